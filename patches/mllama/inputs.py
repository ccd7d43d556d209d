"""The arguments of a Llama 3.2 Vision forward pass: its images in one list, and which tiles rows may attend to.

Images come in two forms. Pixels are sharded by whole images, because the vision tower attends across the tiles of an
image. The output of the tower and the projector is sharded by tiles, or by images if a rank passes its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mllm_seqpar.adapting import FrameShard, MaskError, ShapeError
from mllm_seqpar.adapting.transformers import ForwardInputs

ASPECT_RATIOS = ("aspect_ratio_ids", "aspect_ratio_mask")
_MASK = "cross_attention_mask"


@dataclass(frozen=True, kw_only=True)
class MllamaInputs(ForwardInputs):
    """The inputs of one pass, with the mask and sizes of the images: tiles, patches of a tile, width of a patch.

    Attributes:
        cross_attention_mask: (B, L or all tokens so far, images, tiles) bool, True where a row attends to a tile; None:
            rows attend to all tiles of their sample.
        samples: number of samples that the images belong to; `B / samples` rows of the batch are beams of one sample.
    """

    cross_attention_mask: Tensor | None
    samples: int
    tiles: int
    patches: int
    width: int

    @property
    def units_per_frame(self) -> int:
        """Tiles of a frame, which one rank holds as a whole."""
        by_images = not self.frames_are_features or (self.frames is not None and self.frames.dim() == 4)
        return self.tiles if by_images else 1

    def visible_tiles(self, per_sample: int) -> Tensor | None:
        """Return (B, L, per_sample) bool on the CPU, the mask of the rows of this pass; None without a mask."""
        return None if self.cross_attention_mask is None else self._rows_of_mask(self.on_host(_MASK), per_sample)

    def _rows_of_mask(self, given: Any, per_sample: int) -> Tensor:
        mask = given
        if mask.dim() == 4 and mask.shape[1] != self.length:  # of all tokens so far; this pass has its last rows
            mask = mask[:, self.past_length : self.past_length + self.length]
        fits = mask.dim() == 4 and mask.shape[0] in (1, self.batch) and mask.shape[1] in (1, self.length)
        if not fits or mask.shape[2] * mask.shape[3] != per_sample:
            raise MaskError(
                f"cross_attention_mask has shape {tuple(given.shape)}; expected (batch, tokens, images, tiles): "
                f"{self.batch} samples, {self.length} tokens after the {self.past_length} cached ones, {per_sample} "
                "tiles in all images of a sample"
            )
        return mask.flatten(2).expand(self.batch, self.length, -1)

    def check(self) -> None:
        """Raise ShapeError or MaskError if the images do not fit together, or do not fit the text."""
        if self.frames is None:
            return
        (self._check_features if self.frames_are_features else self._check_pixels)(self.frames)
        units = self.total_frames * self.units_per_frame
        if self.samples < 1 or self.batch % self.samples or units % self.samples:
            raise ShapeError(
                f"{units} tiles of {self.samples} samples were passed with a batch of {self.batch}; every sample needs "
                "as many images as the others, padding images included"
            )
        if units and self.cross_attention_mask is not None:
            self._rows_of_mask(self.cross_attention_mask, units // self.samples)

    def _check_pixels(self, frames: Tensor) -> None:
        missing = [name for name, x in zip(ASPECT_RATIOS, self.extras, strict=True) if x is None]
        if missing:
            raise ShapeError(f"pixel_values was given without {', '.join(missing)}; pass what the processor returns")
        found = [tuple(x.shape) for x in (frames, *self.extras)]
        if frames.dim() != 5 or found[0][1] != self.tiles or found[1:] != [found[0][:1], found[0][:2]]:
            lead = "images of this rank" if self.visual_shard is not None else "batch, images"
            raise ShapeError(
                f"pixel_values, {' and '.join(ASPECT_RATIOS)} have shapes {found} by images; expected ({lead}, "
                f"{self.tiles} tiles, channels, height, width), ({lead}) and ({lead}, {self.tiles} tiles)"
            )

    def _check_features(self, frames: Tensor) -> None:
        masked = self.cross_attention_mask is not None
        by_images = frames.dim() == 4 and frames.shape[1] == self.tiles
        fits = frames.shape[-1] == self.width and (not masked or frames.shape[-2] == self.patches)
        if not (frames.dim() == 3 or by_images) or not fits:
            raise ShapeError(
                f"cross_attention_states has shape {tuple(frames.shape)}; expected (batch x images x tiles, patches, "
                f"{self.width})" + (f" with {self.patches} patches a tile, as cross_attention_mask has it" * masked)
            )


def flat_images(
    pixels: Tensor | None,
    ratios: tuple[Tensor | None, Tensor | None],
    states: Tensor | None,
    shard: FrameShard | None,
    samples: int,
    patches: int,
) -> tuple[Tensor | None, tuple[Any, ...]]:
    """Return the images of all samples in one list, and their aspect ratios. With `shard` they are flat lists already.

    Args:
        pixels: (B, images, tiles, channels, height, width).
        ratios: ids (B, images) and mask (B, images, tiles).
        states: (..., patches, width), or all of a sample in one: (B, images * tiles * patches, width); with `shard` by
            tiles (t, patches, width), or by images (f, tiles, patches, width).
    """
    if pixels is not None:
        if shard is not None:
            return pixels, ratios
        # (B, images, ...) -> (B * images, ...). A tensor with too few dimensions stays, for the check to report.
        merged = [x.flatten(0, 1) if x is not None and x.dim() > 1 else x for x in (pixels, *ratios)]
        return merged[0], tuple(merged[1:])
    if states is None:
        return None, ()
    if states.dim() > 3 and shard is None:
        states = states.flatten(0, -3)
    whole = shard is None and states.dim() == 3 and states.shape[1] != patches
    if whole and samples and states[..., 0].numel() % (samples * patches) == 0:
        states = states.reshape(-1, patches, states.shape[2])
    return states, ()
