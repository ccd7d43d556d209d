"""A corpus of odd and ordinary videos, made with PyAV: containers, codecs, and what cameras and tools do to files.

Each case names a file, how it is made, and how it is read: by the times of its packets, or counted.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

WIDTH, HEIGHT, FRAMES, GROUP = 64, 48, 36, 12
X264 = {"g": str(GROUP), "bf": "2", "preset": "veryfast", "sc_threshold": "0"}
X265 = {
    "preset": "ultrafast",
    "x265-params": f"log-level=none:keyint={GROUP}:min-keyint={GROUP}:bframes=2:scenecut=0:open-gop=0",
}
X265_OPEN = X265 | {"x265-params": f"log-level=none:keyint={GROUP}:bframes=2"}
MPEG = {"g": str(GROUP), "bf": "2"}
UNEVEN = [40 * i + 7 * (i % 3) + 600 * (i > 20) for i in range(FRAMES)]
"""Times in milliseconds with jitter and a pause."""

ONE = 1 << 16
MIRRORS = {
    "hflip": (-ONE, 0, 0, ONE),
    "vflip": (ONE, 0, 0, -ONE),
    "transpose": (0, ONE, ONE, 0),
    "transverse": (0, -ONE, -ONE, 0),
    "quarter": (0, ONE, -ONE, 0),
    "half": (-ONE, 0, 0, -ONE),
}
"""The four numbers of a display matrix that turn and mirror."""


def picture(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Return an image (height, width, 3) of a moving scene, different for each number, without any symmetry."""
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([rows * 3 % 256, columns * 3 % 256, (rows + columns + 5 * number) % 256], -1).astype(np.uint8)
    image[8:20, 2 + number : 14 + number] = (250, 40, 6 * number % 256)
    return image


def encode(
    path: Path,
    codec: str,
    options: dict[str, str] | None = None,
    *,
    times: Sequence[int] | None = None,
    frames: int = FRAMES,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    pixels: str = "yuv420p",
    container: dict[str, str] | None = None,
    format: str | None = None,
) -> Path:
    """Write the scene with 25 frames a second, or with these times in milliseconds."""
    with av.open(str(path), "w", options=container or {}, format=format) as out:
        stream = out.add_stream(codec, rate=25, options=options or {})
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.codec_context.thread_count = 1
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(picture(number, *size), format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    return path


def packets_of(path: Path, format: str | None = None) -> list[av.Packet]:
    with av.open(str(path), format=format) as file:
        return [packet for packet in file.demux(video=0) if packet.size]


def remux(
    path: Path,
    source: Path,
    change: Callable[[int, Any], Any] = lambda number, packet: packet,
    *,
    options: dict[str, str] | None = None,
) -> Path:
    """Copy the packets of a file that `change(number, packet)` returns, which may change them."""
    with av.open(str(source)) as file, av.open(str(path), "w", options=options or {}) as out:
        stream = out.add_stream_from_template(file.streams.video[0])
        for number, packet in enumerate(p for p in file.demux(video=0) if p.size):
            kept = change(number, packet)
            if kept is not None:
                kept.stream = stream
                out.mux(kept)
    return path


def in_decoding_order(number: int, packet: Any) -> Any:
    """Give a packet the times that a tool makes for a stream without times."""
    packet.pts = packet.dts = number * round(Fraction(1, 25) / packet.time_base)
    return packet


def cut(first: int, from_key: int) -> Callable[[int, Any], Any]:
    """Return a change that starts a file at frame `first`, with the packets since frame `from_key` before it."""

    def change(number: int, packet: Any) -> Any:
        if number < from_key:
            return None
        shift = round(first / 25 / packet.time_base)
        packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
        return packet

    return change


def box(data: bytes, name: bytes) -> tuple[int, int]:
    """Return (start, end) of a box of an mp4 file."""
    start = data.index(name) - 4
    return start, start + int.from_bytes(data[start : start + 4], "big")


def patched(path: Path, name: bytes, offset: int, content: bytes) -> Path:
    """Overwrite bytes of a box of an mp4 file."""
    data = bytearray(path.read_bytes())
    start, _ = box(data, name)
    data[start + offset : start + offset + len(content)] = content
    path.write_bytes(data)
    return path


def turned(path: Path, matrix: tuple[int, int, int, int]) -> Path:
    a, b, c, d = matrix
    return patched(path, b"tkhd", 48, struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30))


def edited(path: Path, *edits: tuple[int, int]) -> Path:
    """Replace the edit list of an mp4 file whose header is at its end: (milliseconds, first frame) each."""
    data = path.read_bytes()
    start, end = box(data, b"elst")
    offset, step = struct.unpack(">i", data[start + 20 : start + 24])[0], 512
    rows = [struct.pack(">IiI", length, -1 if first < 0 else offset + step * first, ONE) for length, first in edits]
    new = struct.pack(">I4sII", 16 + 12 * len(rows), b"elst", 0, len(rows)) + b"".join(rows)
    changed = bytearray(data[:start] + new + data[end:])
    for parent in (b"edts", b"trak", b"moov"):
        at = changed.rindex(parent, 0, start + 8) - 4
        size = int.from_bytes(changed[at : at + 4], "big") + len(new) - (end - start)
        changed[at : at + 4] = size.to_bytes(4, "big")
    path.write_bytes(changed)
    return path


def joined(path: Path, *parts: Path) -> Path:
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path


def from_inside(path: Path, source: Path, packet: int) -> Path:
    """Write a transport stream from one of its packets on, after its tables."""
    data, place = source.read_bytes(), packets_of(source)[packet].pos or 0
    path.write_bytes(data[: 3 * 188] + data[place // 188 * 188 :])
    return path


def hidden_vp8(path: Path, source: Path) -> Path:
    """Copy VP8 so that every fifth frame is decoded but not shown."""

    def change(number: int, packet: Any) -> Any:
        if number % 5 != 3:
            return packet
        content = bytearray(bytes(packet))
        content[0] &= ~0x10
        hidden = av.Packet(bytes(content))
        hidden.pts, hidden.dts, hidden.time_base = packet.pts, packet.dts, packet.time_base
        return hidden

    return remux(path, source, change)


def streams(path: Path, sources: Sequence[Path], default: int | None) -> Path:
    """Write the videos of several files as streams of one, one of which is the default."""
    with av.open(str(path), "w") as out:
        flags = av.stream.Disposition
        for number, source in enumerate(sources):
            with av.open(str(source)) as file:
                stream = out.add_stream_from_template(file.streams.video[0])
                stream.disposition = flags.default if number == default else flags(0)
        for number, source in enumerate(sources):
            with av.open(str(source)) as file:
                for packet in file.demux(video=0):
                    if packet.size:
                        packet.stream = out.streams.video[number]
                        out.mux(packet)
    return path


def with_cover(path: Path, source: Path, cover: Path) -> Path:
    """Write an mp4 with a cover picture, whose user data come before the track, so that the picture is stream 0."""
    with av.open(str(path), "w") as out, av.open(str(source)) as file, av.open(str(cover)) as still:
        pairs = []
        for number, opened in enumerate((file, still)):
            stream = out.add_stream_from_template(opened.streams.video[0])
            if number:
                stream.disposition = av.stream.Disposition.attached_pic
            pairs.append((opened, stream))
        for opened, stream in pairs:
            for packet in opened.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    out.mux(packet)
    data = path.read_bytes()
    start, end = box(data, b"moov")
    boxes, place = [], start + 8
    while place < end:
        size = int.from_bytes(data[place : place + 4], "big")
        boxes.append(data[place : place + size])
        place += size
    boxes.sort(key=lambda content: {b"mvhd": 0, b"udta": 1}.get(content[4:8], 2))
    path.write_bytes(data[: start + 8] + b"".join(boxes) + data[end:])
    return path


def animation(path: Path, **options: Any) -> Path:
    images = [Image.fromarray(picture(number)) for number in range(FRAMES)]
    images[0].save(path, save_all=True, append_images=images[1:], duration=40, **options)
    return path


Make = Callable[[Path, Path], Path]
"""Writes a file, given its path and the folder of intermediate files."""


@dataclass(frozen=True)
class Case:
    """A file of the corpus.

    Attributes:
        make: writes the file.
        counted: whether frames are counted, and not found by the times of packets.
        frames: how many are shown; -1: it depends on the version of FFmpeg.
        upright: how the decoded images are turned.
        stream: the number of the video stream that is read.
        command: whether the ffmpeg command of any version shows the same frames.
    """

    make: Make
    counted: bool = False
    frames: int = FRAMES
    upright: Callable[[np.ndarray], np.ndarray] = field(default=lambda image: image)
    stream: int = 0
    command: bool = True


def base(folder: Path, suffix: str = "mp4") -> Path:
    """Return the scene as H.264 with B-frames, closed groups of pictures."""
    return once(folder, f"base.{suffix}", "libx264", X264)


def once(folder: Path, name: str, *args: Any, **options: Any) -> Path:
    path = folder / name
    return path if path.exists() else encode(path, *args, **options)


def of(name: str, codec: str, options: dict[str, str] | None = None, **more: Any) -> Callable[[Path], Path]:
    """Return a function that returns an intermediate file, which it writes once."""
    return lambda folder: once(folder, f"source_{name}", codec, options, **more)


def plain(codec: str, options: dict[str, str] | None = None, **more: Any) -> Make:
    return lambda path, folder: encode(path, codec, options, **more)


def copied(
    change: Callable[[int, Any], Any] = lambda number, packet: packet,
    source: Callable[[Path], Path] = base,
    then: Callable[[Path], Path] = lambda path: path,
    **options: str,
) -> Make:
    """Return what copies the packets of an intermediate file (`remux`), and changes the result by `then`."""
    return lambda path, folder: then(remux(path, source(folder), change, options=options))


def edits(*edits: tuple[int, int]) -> Make:
    return copied(then=lambda path: edited(path, *edits))


def join(*sources: Callable[[Path], Path]) -> Make:
    return lambda path, folder: joined(path, *(source(folder) for source in sources))


def from_packet_5(source: Callable[[Path], Path]) -> Make:
    return lambda path, folder: from_inside(path, source(folder), 5)


def side_by_side(*sources: Callable[[Path], Path], default: int | None) -> Make:
    return lambda path, folder: streams(path, [source(folder) for source in sources], default)


def files(name: str, suffixes: str, make: Make, **facts: Any) -> dict[str, Case]:
    return {f"{name}.{suffix}": Case(make, **facts) for suffix in suffixes.split()}


GROUPS = {"g": str(GROUP)}
OPEN = X264 | {"x264-params": "open-gop=1"}
REFRESH = X264 | {"bf": "0", "x264-params": f"intra-refresh=1:keyint={GROUP}"}
COMMON, LATE = "mp4 mov mkv ts flv nut", [5000 + time for time in UNEVEN]
PAUSES = [1000 * (i // 10) + 10 * (i % 10) for i in range(120)]
"""Frames that are shown for a second among frames of 10 ms; the times of the packets show that they are wanted."""

FRAGMENTS = "frag_keyframe+empty_moov+default_base_moof"
OPEN_MP4, HEVC = of("open.mp4", "libx264", OPEN), of("hevc.mp4", "libx265", X265)
BASE_TS = of("base.ts", "libx264", X264)
LATE_TS = of("late.ts", "libx264", X264, container={"output_ts_offset": "3600"})
MPEG2_TS, MPEG4_TS = of("mpeg2.ts", "mpeg2video", MPEG), of("mpeg4.ts", "mpeg4", MPEG)
LARGE = of("large.mp4", "libx264", X264, size=(96, 64))
PREVIEW = of("preview.mp4", "libx264", X264, frames=1)
COVER = of("cover.mkv", "mjpeg", frames=1, pixels="yuvj420p", size=(96, 64))
VP8 = of("vp8.webm", "libvpx", GROUPS)
TWICE: dict[str, Any] = {"counted": True, "frames": 2 * FRAMES}
SEVERAL: dict[str, Any] = {"stream": 1, "command": False}
UPRIGHT: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "hflip": lambda x: x[:, ::-1],
    "vflip": lambda x: x[::-1],
    "transpose": lambda x: x.transpose(1, 0, 2),
    "transverse": lambda x: x[::-1, ::-1].transpose(1, 0, 2),
    "quarter": lambda x: np.rot90(x, -1),
    "half": lambda x: x[::-1, ::-1],
}

CORPUS: dict[str, Case] = {
    **files("h264", COMMON, plain("libx264", X264)),
    **files("h264_no_b", COMMON, plain("libx264", X264 | {"bf": "0"})),
    **files("open_gop", COMMON, plain("libx264", OPEN)),
    **files("uneven", COMMON, plain("libx264", X264, times=UNEVEN)),
    **files("late", "mp4 mkv ts", plain("libx264", X264, times=LATE)),
    **files("pauses", "mp4", plain("libx264", X264, times=PAUSES, frames=120), frames=120),
    # Long enough for a seek without an index.
    **files("long", "mkv ts", plain("libx264", X264, frames=200), frames=200),
    **files("long_open_gop", "ts", plain("libx264", OPEN, frames=200), frames=200),
    **files("hevc", "mp4 mkv ts", plain("libx265", X265)),
    **files("open_hevc", "mp4 mkv ts", plain("libx265", X265_OPEN)),
    **files("mpeg4", "mp4 mkv ts", plain("mpeg4", MPEG | {"b": "2M"})),
    **files("refresh", "mp4 mkv ts", plain("libx264", REFRESH)),
    **files("mpeg2", "mpg ts mkv", plain("mpeg2video", MPEG)),
    **files("vp8", "webm mkv", plain("libvpx", GROUPS)),
    **files("vp9", "webm mkv", plain("libvpx-vp9", GROUPS | {"lag-in-frames": "8"})),
    **files("vp9", "mp4", plain("libvpx-vp9", GROUPS)),
    **files("av1", "mp4 webm", plain("libsvtav1", GROUPS | {"preset": "12"})),
    **files("mjpeg", "avi mov mkv", plain("mjpeg", pixels="yuvj420p")),
    "ffv1.mkv": Case(plain("ffv1")),
    "prores.mov": Case(plain("prores_ks", pixels="yuv422p10le")),
    "flv1.flv": Case(plain("flv")),
    "wmv2.wmv": Case(plain("wmv2")),
    "h263.3gp": Case(plain("h263", size=(176, 144))),
    "mpeg2.mxf": Case(plain("mpeg2video", MPEG, pixels="yuv422p")),
    "gif.gif": Case(plain("gif", pixels="rgb8")),
    "apng.apng": Case(plain("apng", pixels="rgb24", format="apng")),
    "animation.webp": Case(lambda path, _: animation(path, lossless=True), counted=True, command=False),
    "raw.y4m": Case(plain("wrapped_avframe", format="yuv4mpegpipe")),
    # Without presentation times, or with those of decoding.
    "h264.avi": Case(plain("libx264", X264), counted=True),
    "mpeg4.avi": Case(plain("mpeg4", MPEG), counted=True),
    "mpeg2.avi": Case(plain("mpeg2video", MPEG), counted=True),
    "raw.h264": Case(plain("libx264", X264), counted=True),
    "raw.hevc": Case(plain("libx265", X265), counted=True),
    "raw.m4v": Case(plain("mpeg4", MPEG), counted=True),
    "h264.mpg": Case(plain("libx264", X264, format="mpeg"), counted=True),
    **files("copied", "mp4 mkv flv ts", copied(in_decoding_order), counted=True),
    "copied_mpeg4.mp4": Case(copied(in_decoding_order, of("mpeg4.mp4", "mpeg4", MPEG)), counted=True),
    "no_ctts.mp4": Case(copied(then=lambda path: patched(path, b"ctts", 4, b"free")), counted=True, frames=34),
    # Edit lists.
    **files("cut", "mp4 mov", copied(cut(17, 12)), frames=19),
    **files("cut_open", "mp4 mov", copied(cut(17, 12), OPEN_MP4), frames=19),
    **files("cut_hevc", "mp4 mov", copied(cut(17, 12), HEVC), frames=19),
    "cut_fragments.mp4": Case(copied(cut(17, 12), movflags=FRAGMENTS), frames=24),  # without an edit list
    "trimmed.mp4": Case(edits((800, 0)), frames=20),
    "middle.mp4": Case(edits((400, 15)), frames=10),
    "backward.mp4": Case(edits((400, 15), (400, 0)), counted=True, frames=20),
    "repeated.mp4": Case(edits((800, 0), (800, 0)), counted=True, frames=40),
    "gap.mp4": Case(edits((400, 0), (400, 20)), counted=True, frames=20),
    "delayed.mp4": Case(edits((500, -1), (1440, 0))),
    # Headers that are wrong or incomplete.
    "half.mp4": Case(copied(then=lambda path: patched(path, b"mdhd", 24, struct.pack(">I", 512 * FRAMES // 2)))),
    "no_stss.mp4": Case(
        copied(
            source=of("mpeg4_no_b.mp4", "mpeg4", {"g": "12", "b": "2M"}),
            then=lambda path: patched(path, b"stss", 4, b"free"),
        )
    ),
    "hybrid.mp4": Case(copied(movflags="frag_keyframe")),
    "fragments.mp4": Case(copied(movflags=FRAGMENTS)),
    # Recordings that were joined, or begin inside a group of pictures.
    "joined_h264.ts": Case(join(BASE_TS, BASE_TS), **TWICE),
    "joined_open.ts": Case(join(*2 * [of("open.ts", "libx264", OPEN)]), **TWICE),
    "joined_mpeg2.ts": Case(join(MPEG2_TS, MPEG2_TS), **TWICE),
    "joined_mpeg2.mpg": Case(join(*2 * [of("mpeg2.mpg", "mpeg2video", MPEG)]), **TWICE),
    "joined_raw.h264": Case(join(*2 * [of("raw.h264", "libx264", X264)]), **TWICE),
    "joined_earlier.ts": Case(join(LATE_TS, BASE_TS), **TWICE),
    "joined_later.ts": Case(join(BASE_TS, LATE_TS), **TWICE),
    "inside_h264.ts": Case(from_packet_5(BASE_TS), counted=True, frames=-1),
    "inside_mpeg2.ts": Case(from_packet_5(MPEG2_TS), counted=True, frames=-1),
    "inside_mpeg4.ts": Case(from_packet_5(MPEG4_TS), counted=True, frames=-1),
    # Several streams, hidden frames, and display matrices.
    "default_is_second.mkv": Case(side_by_side(LARGE, base, default=1), **SEVERAL),
    "default_is_first.mkv": Case(side_by_side(base, LARGE, default=0), command=False),
    "no_default.mkv": Case(side_by_side(base, LARGE, default=None), **SEVERAL),
    "preview.mp4": Case(side_by_side(PREVIEW, base, default=0), **SEVERAL),
    "cover.mp4": Case(lambda path, folder: with_cover(path, base(folder), COVER(folder)), **SEVERAL),
    "animation.avif": Case(lambda path, _: animation(path), **SEVERAL),
    "hidden.webm": Case(lambda path, folder: hidden_vp8(path, VP8(folder)), counted=True, frames=FRAMES - 7),
    **{
        f"{name}.mp4": Case(copied(then=lambda path, matrix=matrix: turned(path, matrix)), upright=UPRIGHT[name])
        for name, matrix in MIRRORS.items()
    },
}

QUICK = (
    *("h264.mp4", "h264.mkv", "late.mkv", "pauses.mp4", "long_open_gop.ts", "mpeg4.mp4", "refresh.mp4"),
    *("animation.webp", "h264.avi", "raw.h264", "copied.mp4", "cut.mp4", "backward.mp4", "half.mp4", "joined_h264.ts"),
    *("inside_h264.ts", "default_is_second.mkv", "cover.mp4", "hidden.webm", "hflip.mp4", "transverse.mp4"),
)
"""The files of the quick tests."""
