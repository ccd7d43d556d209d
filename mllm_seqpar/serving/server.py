"""`mllm-seqpar serve`: OpenAI's chat completions about videos, by HTTP, and a page to try it.

    mllm-seqpar serve --model DIR --num_processes 4 --media_root /videos

Rank 0's main thread runs the model. A second thread runs the HTTP interface (`app`).
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mllm_seqpar._compat import optional_import
from mllm_seqpar.cli.launch import own_ranks
from mllm_seqpar.cli.options import option, parse_options
from mllm_seqpar.cli.outputs import require_writable_directory
from mllm_seqpar.cli.progress import note, quiet_transformers
from mllm_seqpar.comm.agreement import attempt
from mllm_seqpar.errors import ConfigError
from mllm_seqpar.inference.arguments import ServingOptions
from mllm_seqpar.videos.frame_choice import DEFAULT_FRAMES

from .jobs import Worker, joined_worker

API_KEY = "MLLM_SEQPAR_API_KEY"
MB = 1_000_000
_HOST = re.compile(r"[\w-]+(\.[\w-]+)*|[0-9a-fA-F]*:[0-9a-fA-F:.]*:[0-9a-fA-F.]*")
"""The name of a host, or an address of version 4 or 6."""

_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""A machine that has vanished does not close its connections; without an answer for these seconds, the server does."""

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s@?#]+")
"""An origin as browsers send it; extensions of browsers have schemes of their own."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServingOptions):
    """The options of the server."""

    host: str = option("address to listen on; 0.0.0.0 for all", "127.0.0.1")
    port: int = option("port to listen on; 0 for any free one", 8000, least=0, most=65_535)
    api_key: str | None = option(
        f"key that clients must send; the environment variable {API_KEY} keeps it out of the list of processes", None
    )
    served_model_name: str | None = option(
        "name of the model for clients (default: that of the directory, or of the run that wrote its model there)", None
    )
    media_root: str | None = option("directory below which requests may name files by path (default: none)", None)
    allow_urls: tuple[str, ...] = option(
        'host whose http(s) URLs requests may name; may be repeated; "*" for all public ones (default: none)', ()
    )
    allowed_origins: tuple[str, ...] = option(
        'origin of pages elsewhere that may use the server, such as https://example.org; may be repeated; "*" for all '
        "(default: only the server's own page)",
        (),
    )
    upload_dir: str | None = option(
        "directory for uploads, which all machines share (default: a temporary one of this machine)", None
    )
    max_upload_mb: float = option("largest request, in megabytes", 1000.0, above=0)
    max_stored_mb: float = option("all uploads together, in megabytes", 10_000.0, above=0)
    max_queue: int = option("requests that may wait while one is answered", 16, least=0)
    keep_conversations: int = option(
        "conversations whose features and K and V are kept for their next turn", 1, least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for host in self.allow_urls:
            if host != "*" and not _HOST.fullmatch(host):
                parts, _ = attempt(functools.partial(urlsplit, host if "//" in host else f"//{host}"))
                found = "" if parts is None else parts.hostname or ""
                raise ConfigError(
                    f"--allow_urls {host}: expected the name of one host, without scheme, port or path"
                    + (f"; give {found}" if _HOST.fullmatch(found) else ', or "*" for all public hosts')
                )
        for name in ("media_root", "upload_dir"):
            folder = getattr(self, name)
            if folder is not None and not Path(folder).is_dir():
                raise ConfigError(f"--{name} {folder}: no such directory; give one that exists")
        if self.upload_dir is not None:
            require_writable_directory("upload_dir", self.upload_dir)

        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allowed_origins {origin}: expected a scheme and a host, without a path, such as "
                    "https://example.org or http://localhost:3000"
                )

    @property
    def name(self) -> str:
        """The name of the model for clients. Every run of `finetune` writes to a directory called model."""
        folder = Path(self.model).resolve()
        run = folder.parent.name if folder.name == "model" else ""
        return self.served_model_name or run or folder.name


def serve(argv: Sequence[str]) -> None:
    """Answer requests until SIGINT or SIGTERM. The ranks that `own_ranks` starts call this too.

    Raises:
        SeqParError: on invalid options, a model that cannot be read, or a port that is in use.
    """
    quiet_transformers()
    args = parse_options(
        ServeOptions,
        argv,
        prog="mllm-seqpar serve",
        description="Answer questions about videos by OpenAI's HTTP interface, and show a page to ask them.",
        example="mllm-seqpar serve --model DIR --num_processes 4 --media_root /videos",
    )
    if int(os.environ.get("RANK", "0")):
        with joined_worker(args, args.keep_conversations) as worker:
            worker.follow()
        return
    for module in ("fastapi", "prometheus_client", "pydantic", "python_multipart", "uvicorn"):
        optional_import(module, extra="serve", needed_for="serve")
    from .media import upload_folder

    with _bound_socket(args) as listener, upload_folder(args.upload_dir) as folder:
        remove = functools.partial(shutil.rmtree, folder, ignore_errors=True)
        with own_ranks(args.num_processes, f"{__name__}:serve", argv, before_exit=remove):
            with joined_worker(args, args.keep_conversations) as worker:
                _serve(args, worker, listener, folder)


def _serve(args: ServeOptions, worker: Worker, listener: socket.socket, folder: Path) -> None:
    import uvicorn

    from .app import Service, make_app
    from .media import MediaStore
    from .request_queue import RequestQueue

    requests = RequestQueue(args.max_queue)
    key, limit = args.api_key or os.environ.get(API_KEY) or None, int(args.max_upload_mb * MB)
    store = MediaStore(
        folder,
        media_root=args.media_root,
        allowed_hosts=args.allow_urls,
        max_bytes=limit,
        max_total=int(args.max_stored_mb * MB),
    )
    service = Service(
        model=args.name,
        store=store,
        queue=requests,
        ranks=worker.engine.comm.size,
        api_key=key,
        max_bytes=limit,
        sampling=args.sampling(),
        frames=args.frame_choice().over(DEFAULT_FRAMES),
        origins=frozenset(args.allowed_origins),
        log=note,
    )
    server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    listener.listen()  # the address is printed before uvicorn's thread listens itself; a request until then waits
    thread.start()
    host, port = listener.getsockname()[:2]
    note(f"{args.name} on {service.ranks} rank{'s' * (service.ranks > 1)}: http://{host}:{port} (page), /v1 (API)")
    if key is None and not host.startswith("127.") and host != "::1":
        note(f"warning: everyone who can reach {host} can use this server; --api_key restricts it")
    if key is None and "*" in args.allowed_origins:
        note("warning: every page that someone opens on this machine can use this server; --api_key restricts it")
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: requests.stop()) for number in signals]
    try:
        requests.answer_all(worker)
    finally:
        for number, handler in zip(signals, before, strict=True):  # a second signal ends the program at once
            signal.signal(number, handler)
        server.should_exit = True
        thread.join(5.0)
    note("stopped")


@contextmanager
def _bound_socket(args: ServeOptions) -> Iterator[socket.socket]:
    """Yield a socket bound to the address, so that a port in use is reported before the model is loaded."""
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # of its connections too
        for name, seconds in _KEEPALIVE.items():
            if hasattr(socket, name):
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        try:
            listener.bind((args.host, args.port))
        except OSError as error:
            wrong_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            remedy = "give an address of this machine as --host" if wrong_host else "choose another port"
            raise ConfigError(f"--host {args.host} --port {args.port}: {error.strerror}; {remedy}") from error
        yield listener
