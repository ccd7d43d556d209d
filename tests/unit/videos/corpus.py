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


@dataclass(frozen=True)
class Case:
    """A file of the corpus.

    Attributes:
        make: writes the file, given its path and the folder of intermediate files.
        counted: whether frames are counted, and not found by the times of packets.
        frames: how many are shown; None: all of the scene.
        quick: whether it is one of the quick tests.
        upright: how the decoded images are turned.
        stream: the number of the video stream that is read.
        command: whether the ffmpeg command of any version shows the same frames.
    """

    make: Callable[[Path, Path], Path]
    counted: bool = False
    frames: int | None = None
    quick: bool = False
    upright: Callable[[np.ndarray], np.ndarray] = field(default=lambda image: image)
    stream: int = 0
    command: bool = True


def plain(codec: str, options: dict[str, str] | None = None, **more: Any) -> Callable[[Path, Path], Path]:
    return lambda path, folder: encode(path, codec, options, **more)


def base(folder: Path, suffix: str = "mp4") -> Path:
    """Return the scene as H.264 with B-frames, closed groups of pictures."""
    path = folder / f"base.{suffix}"
    return path if path.exists() else encode(path, "libx264", X264)


def once(folder: Path, name: str, *args: Any, **options: Any) -> Path:
    path = folder / name
    return path if path.exists() else encode(path, *args, **options)


def open_gop(folder: Path, suffix: str) -> Path:
    return once(folder, f"open.{suffix}", "libx264", X264 | {"x264-params": "open-gop=1"})


def _containers() -> dict[str, Case]:
    found = {}
    for suffix in ("mp4", "mov", "mkv", "ts", "flv", "nut"):
        quick = suffix in ("mp4", "mkv")
        found[f"h264.{suffix}"] = Case(plain("libx264", X264), quick=quick)
        found[f"h264_no_b.{suffix}"] = Case(plain("libx264", X264 | {"bf": "0"}))
        found[f"open_gop.{suffix}"] = Case(plain("libx264", X264 | {"x264-params": "open-gop=1"}))
        found[f"uneven.{suffix}"] = Case(plain("libx264", X264, times=UNEVEN))
    for suffix in ("mp4", "mkv", "ts"):
        found[f"hevc.{suffix}"] = Case(plain("libx265", X265))
        found[f"open_hevc.{suffix}"] = Case(plain("libx265", X265_OPEN))
        found[f"mpeg4.{suffix}"] = Case(plain("mpeg4", MPEG | {"b": "2M"}), counted=False)
        found[f"refresh.{suffix}"] = Case(
            plain("libx264", X264 | {"bf": "0", "x264-params": f"intra-refresh=1:keyint={GROUP}"}),
            quick=suffix == "mp4",
        )
    for suffix in ("mpg", "ts", "mkv"):
        found[f"mpeg2.{suffix}"] = Case(plain("mpeg2video", MPEG))
    for suffix in ("webm", "mkv"):
        found[f"vp8.{suffix}"] = Case(plain("libvpx", {"g": str(GROUP)}))
        found[f"vp9.{suffix}"] = Case(plain("libvpx-vp9", {"g": str(GROUP), "lag-in-frames": "8"}))
    found["vp9.mp4"] = Case(plain("libvpx-vp9", {"g": str(GROUP)}))
    found["av1.mp4"] = Case(plain("libsvtav1", {"preset": "12", "g": str(GROUP)}))
    found["av1.webm"] = Case(plain("libsvtav1", {"preset": "12", "g": str(GROUP)}))
    for suffix in ("avi", "mov", "mkv"):
        found[f"mjpeg.{suffix}"] = Case(plain("mjpeg", pixels="yuvj420p"))
    found["ffv1.mkv"] = Case(plain("ffv1"))
    found["prores.mov"] = Case(plain("prores_ks", pixels="yuv422p10le"))
    found["flv1.flv"] = Case(plain("flv"))
    found["wmv2.wmv"] = Case(plain("wmv2"))
    found["h263.3gp"] = Case(plain("h263", size=(176, 144)))
    found["mpeg2.mxf"] = Case(plain("mpeg2video", MPEG, pixels="yuv422p"))
    found["gif.gif"] = Case(plain("gif", pixels="rgb8"))
    found["apng.apng"] = Case(plain("apng", pixels="rgb24", format="apng"))
    found["animation.webp"] = Case(
        lambda path, folder: animation(path, lossless=True), counted=True, quick=True, command=False
    )
    found["raw.y4m"] = Case(plain("wrapped_avframe", format="yuv4mpegpipe"))
    return found


def _without_times() -> dict[str, Case]:
    found = {"h264.avi": Case(plain("libx264", X264), counted=True, quick=True)}
    found["mpeg4.avi"] = Case(plain("mpeg4", MPEG), counted=True)
    found["mpeg2.avi"] = Case(plain("mpeg2video", MPEG), counted=True)
    found["raw.h264"] = Case(plain("libx264", X264), counted=True, quick=True)
    found["raw.hevc"] = Case(plain("libx265", X265), counted=True)
    found["raw.m4v"] = Case(plain("mpeg4", MPEG), counted=True)
    found["h264.mpg"] = Case(plain("libx264", X264, format="mpeg"), counted=True)
    for suffix in ("mp4", "mkv", "flv", "ts"):
        found[f"copied.{suffix}"] = Case(
            lambda path, folder: remux(path, base(folder), in_decoding_order), counted=True, quick=suffix == "mp4"
        )
    found["copied_mpeg4.mp4"] = Case(
        lambda path, folder: remux(path, once(folder, "mpeg4.mp4", "mpeg4", MPEG), in_decoding_order), counted=True
    )
    found["no_ctts.mp4"] = Case(
        lambda path, folder: patched(remux(path, base(folder)), b"ctts", 4, b"free"), counted=True, frames=34
    )
    return found


def _edit_lists() -> dict[str, Case]:
    found = {}
    for suffix in ("mp4", "mov"):
        found[f"cut.{suffix}"] = Case(
            lambda path, folder: remux(path, base(folder), cut(17, 12)), frames=19, quick=suffix == "mp4"
        )
        found[f"cut_open.{suffix}"] = Case(
            lambda path, folder: remux(path, open_gop(folder, "mp4"), cut(17, 12)), frames=19
        )
        found[f"cut_hevc.{suffix}"] = Case(
            lambda path, folder: remux(path, once(folder, "hevc.mp4", "libx265", X265), cut(17, 12)), frames=19
        )
    found["cut_fragments.mp4"] = Case(
        lambda path, folder: remux(
            path, base(folder), cut(17, 12), options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}
        ),
        frames=24,  # without an edit list
    )
    found["trimmed.mp4"] = Case(lambda path, folder: edited(remux(path, base(folder)), (800, 0)), frames=20)
    found["middle.mp4"] = Case(lambda path, folder: edited(remux(path, base(folder)), (400, 15)), frames=10)
    for name, edits, frames in (
        ("backward", ((400, 15), (400, 0)), 20),
        ("repeated", ((800, 0), (800, 0)), 40),
        ("gap", ((400, 0), (400, 20)), 20),
    ):
        found[f"{name}.mp4"] = Case(
            lambda path, folder, edits=edits: edited(remux(path, base(folder)), *edits),
            counted=True,
            frames=frames,
            quick=name == "backward",
        )
    found["delayed.mp4"] = Case(lambda path, folder: edited(remux(path, base(folder)), (500, -1), (1440, 0)))
    return found


def _headers() -> dict[str, Case]:
    half = struct.pack(">I", 512 * FRAMES // 2)
    found = {"half.mp4": Case(lambda path, folder: patched(remux(path, base(folder)), b"mdhd", 24, half), quick=True)}
    found["no_stss.mp4"] = Case(
        lambda path, folder: patched(
            remux(path, once(folder, "mpeg4_no_b.mp4", "mpeg4", {"g": "12", "b": "2M"})), b"stss", 4, b"free"
        )
    )
    for name, flags in (("hybrid", "frag_keyframe"), ("fragments", "frag_keyframe+empty_moov+default_base_moof")):
        found[f"{name}.mp4"] = Case(
            lambda path, folder, flags=flags: remux(path, base(folder), options={"movflags": flags})
        )
    return found


def _joined() -> dict[str, Case]:
    twice = 2 * FRAMES
    found = {}
    for name, source, quick in (
        ("h264.ts", base, True),
        ("open.ts", open_gop, False),
        ("mpeg2.ts", lambda folder, _: once(folder, "mpeg2.ts", "mpeg2video", MPEG), False),
        ("mpeg2.mpg", lambda folder, _: once(folder, "mpeg2.mpg", "mpeg2video", MPEG), False),
        ("raw.h264", lambda folder, _: once(folder, "raw.h264", "libx264", X264), False),
    ):
        found[f"joined_{name}"] = Case(
            lambda path, folder, source=source: joined(path, *2 * [source(folder, path.suffix[1:])]),
            counted=True,
            frames=twice,
            quick=quick,
        )

    def other_clock(path: Path, folder: Path, late_first: bool) -> Path:
        late = once(folder, "late.ts", "libx264", X264, container={"output_ts_offset": "3600"})
        return joined(path, *([late, base(folder, "ts")] if late_first else [base(folder, "ts"), late]))

    found["joined_earlier.ts"] = Case(lambda path, folder: other_clock(path, folder, True), counted=True, frames=twice)
    found["joined_later.ts"] = Case(lambda path, folder: other_clock(path, folder, False), counted=True, frames=twice)
    for name, codec, options in (("h264", "libx264", X264), ("mpeg2", "mpeg2video", MPEG), ("mpeg4", "mpeg4", MPEG)):
        found[f"inside_{name}.ts"] = Case(
            lambda path, folder, name=name, codec=codec, options=options: from_inside(
                path, once(folder, f"{name}_whole.ts", codec, options), 5
            ),
            counted=True,
            frames=-1,
            quick=name == "h264",
        )
    return found


def _streams() -> dict[str, Case]:
    def large(folder: Path) -> Path:
        return once(folder, "large.mp4", "libx264", X264, size=(96, 64))

    still = {"frames": 1}
    found = {
        "default_is_second.mkv": Case(
            lambda path, folder: streams(path, [large(folder), base(folder)], default=1),
            stream=1,
            quick=True,
            command=False,
        ),
        "default_is_first.mkv": Case(
            lambda path, folder: streams(path, [base(folder), large(folder)], default=0), command=False
        ),
        "no_default.mkv": Case(
            lambda path, folder: streams(path, [base(folder), large(folder)], default=None), stream=1, command=False
        ),
        "preview.mp4": Case(
            lambda path, folder: streams(
                path, [once(folder, "preview.mp4", "libx264", X264, **still), base(folder)], default=0
            ),
            stream=1,
            command=False,
        ),
        "cover.mp4": Case(
            lambda path, folder: with_cover(
                path, base(folder), once(folder, "cover.mkv", "mjpeg", frames=1, pixels="yuvj420p", size=(96, 64))
            ),
            stream=1,
            quick=True,
            command=False,
        ),
        "animation.avif": Case(lambda path, folder: animation(path), stream=1, command=False),
        "hidden.webm": Case(
            lambda path, folder: hidden_vp8(path, once(folder, "vp8.webm", "libvpx", {"g": "12"})),
            counted=True,
            frames=FRAMES - 7,
            quick=True,
        ),
    }
    transforms: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "hflip": lambda x: x[:, ::-1],
        "vflip": lambda x: x[::-1],
        "transpose": lambda x: x.transpose(1, 0, 2),
        "transverse": lambda x: x[::-1, ::-1].transpose(1, 0, 2),
        "quarter": lambda x: np.rot90(x, -1),
        "half": lambda x: x[::-1, ::-1],
    }
    for name, matrix in MIRRORS.items():
        found[f"{name}.mp4"] = Case(
            lambda path, folder, matrix=matrix: turned(remux(path, base(folder)), matrix),
            upright=transforms[name],
            quick=name in ("hflip", "transverse"),
        )
    return found


CORPUS = _containers() | _without_times() | _edit_lists() | _headers() | _joined() | _streams()
