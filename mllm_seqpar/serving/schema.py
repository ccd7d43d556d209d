"""The body of a chat completion request as pydantic models: fields, types and ranges.

A field that no model has is refused, a number is not read from a text, and null stands for a field that is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, model_validator

MOMENTS = 100
"""The most moments that a request may ask for."""

_MOST = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class MediaReference:
    """A media part as the request names it: by URL or by the id of an uploaded file.

    Attributes:
        kind: "video", "image", or None for that of the uploaded file.
        url: data:, http(s):, file: or a path.
        file_id: of an uploaded file.
        sampling: fps, num_frames, max_frames, start, end of a video, as far as they are given.
        param: the part of the request, for messages.
    """

    kind: str | None
    url: str | None = None
    file_id: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    param: str


class _Object(BaseModel):
    """A JSON object; null stands for a field that is left out, and numbers are not read from texts."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return cls.prepare({name: value for name, value in given.items() if value is not None})

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Return the fields in the form of this class."""
        return given


class _Frames(_Object):
    """The sampling of a video; `start` and `end` are the seconds of a clip."""

    fps: float | None = Field(default=None, gt=0)
    num_frames: int | None = Field(default=None, gt=0, le=_MOST)
    max_frames: int | None = Field(default=None, gt=0, le=_MOST)
    start: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    end: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> _Frames:
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("both fps and num_frames; give one of them")
        if self.end is not None and self.end <= (self.start or 0):
            raise ValueError(f"the clip from {self.start or 0:g} to {self.end:g} seconds is empty")
        return self

    def given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _Frames.model_fields}
        return {name: value for name, value in values.items() if value is not None}


class TextPart(_Object):
    type: Literal["text"]
    text: str


class _Url(_Object):
    url: str = Field(min_length=1)


class _ImageUrl(_Url):
    detail: str | None = None


class _VideoUrl(_Url, _Frames):
    pass


class _FileId(_Frames):
    file_id: str = Field(min_length=1)


class _Media(_Object):
    """A part with media; `uuid` is a name for caches."""

    uuid: str | None = None

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        kind = given.get("type")
        if kind in ("image_url", "video_url") and isinstance(given.get(kind), str):
            given[kind] = {"url": given[kind]}
        return given

    def ignored(self) -> list[str]:
        return [] if self.uuid is None else ["uuid"]


class _Image(_Media):
    type: Literal["image_url"]
    image_url: _ImageUrl

    def reference(self, where: str) -> MediaReference:
        return MediaReference(kind="image", url=self.image_url.url, param=where)

    def ignored(self) -> list[str]:
        return super().ignored() + (["detail"] if self.image_url.detail not in (None, "auto") else [])


class _Clip(_Media, _Frames):
    """A part with the sampling of its video beside or within its object."""

    def within(self) -> _Frames:
        raise NotImplementedError

    @model_validator(mode="after")
    def _merge(self) -> _Clip:
        if twice := sorted(self.given().keys() & self.within().given().keys()):
            raise ValueError(f"{twice[0]} is given twice; give it once")
        _Frames(**self.sampling())
        return self

    def sampling(self) -> dict[str, Any]:
        return self.given() | self.within().given()


class _Video(_Clip):
    type: Literal["video_url"]
    video_url: _VideoUrl

    def within(self) -> _Frames:
        return self.video_url

    def reference(self, where: str) -> MediaReference:
        return MediaReference(kind="video", url=self.video_url.url, sampling=self.sampling(), param=where)


class _File(_Clip):
    type: Literal["file"]
    file: _FileId

    def within(self) -> _Frames:
        return self.file

    def reference(self, where: str) -> MediaReference:
        return MediaReference(kind=None, file_id=self.file.file_id, sampling=self.sampling(), param=where)


_Part = Annotated[TextPart | _Image | _Video | _File, Field(discriminator="type")]


class _Message(_Object):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[_Part], FailFast(), Field(min_length=1)]

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        # Clients send back what they received, with fields that are empty.
        known = {name: x for name, x in given.items() if name in cls.model_fields or (x and name != "annotations")}
        content = known.get("content", "" if known.get("role") == "assistant" else None)
        if isinstance(content, str):
            known["content"] = [{"type": "text", "text": content}]
        return known

    @model_validator(mode="after")
    def _check(self) -> _Message:
        if self.role != "user" and any(not isinstance(part, TextPart) for part in self.content):
            raise ValueError("only a message of the user shows media")
        return self


class _SamplingFields(_Object):
    """The sampling options, with the names and the meaning of transformers' `generate`."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=_MOST)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = None

    def given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _SamplingFields.model_fields}
        if values["top_k"] == -1:  # vLLM's "all"
            values["top_k"] = 0
        return {name: value for name, value in values.items() if value is not None}


class _GenerationConfig(_SamplingFields):
    """What `transformers chat` sends: the fields of a GenerationConfig that are not the default, as JSON."""

    do_sample: bool | None = None
    max_new_tokens: int | None = Field(default=None, gt=0, le=_MOST)
    min_new_tokens: int | None = Field(default=None, ge=0, le=_MOST)
    num_beams: Literal[1] = 1
    use_cache: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, given: Any) -> Any:
        return json.loads(given) if isinstance(given, str) else given

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in given.items() if name != "transformers_version" and not name.startswith("_")}

    def given(self) -> dict[str, Any]:
        lengths = {"max_new_tokens": self.max_new_tokens, "min_new_tokens": self.min_new_tokens}
        values = {name: value for name, value in lengths.items() if value is not None} | super().given()
        if self.do_sample is not None:  # the other values are the defaults of transformers
            values = {"temperature": 1.0, "top_k": 50} | values if self.do_sample else values | {"temperature": 0.0}
        return values


class _StreamOptions(_Object):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: Literal[False] = False


class _MediaOptions(_Object):
    video: _Frames = _Frames()


class Body(_SamplingFields):
    """The body of a request, without the fields that have no effect."""

    model: str = ""
    messages: Annotated[list[_Message], FailFast(), Field(min_length=1)]
    stream: bool = False
    stream_options: _StreamOptions | None = None
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=4)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    max_tokens: int | None = Field(default=None, gt=0, le=_MOST)
    max_completion_tokens: int | None = Field(default=None, gt=0, le=_MOST)
    min_tokens: int | None = Field(default=None, ge=0, le=_MOST)
    evidence: int = Field(default=0, ge=0, le=MOMENTS)
    generation_config: _GenerationConfig = _GenerationConfig()
    mm_processor_kwargs: _Frames = _Frames()
    media_io_kwargs: _MediaOptions = _MediaOptions()

    @classmethod
    def prepare(cls, given: dict[str, Any]) -> dict[str, Any]:
        return given | ({"stop": [given["stop"]]} if isinstance(given.get("stop"), str) else {})
