"""Layer: one process. Visibility of frames for text rows, against loops over the published rules."""

import pytest
import torch
from torch import Tensor

from mllm_seqpar.errors import ConfigError, ShapeError
from mllm_seqpar.models.mplug_owl3 import MediaLayout, hyper_attention, media_layout
from tiny_models.mplug_owl3 import GATES, IMAGE_TOKEN, tiny_text
from tiny_models.mplug_owl3 import media_offset as published_offset


def visible(layout: MediaLayout) -> list[list[set[int]]]:
    return [
        [set(range(first, stop)) for first, stop in zip(firsts, stops, strict=True)]
        for firsts, stops in zip(layout.first.tolist(), layout.stop.tolist(), strict=True)
    ]


def rules(gate: str | None, ids: Tensor) -> list[list[set[int]]]:
    rows, before = [], 0
    for row in ids.tolist():
        placeholders = {before + j: at for j, at in enumerate(i for i, token in enumerate(row) if token == IMAGE_TOKEN)}
        delay = 0 if gate is None else 1
        rows.append([{j for j, at in placeholders.items() if at + delay <= token} for token in range(len(row))])
        before += len(placeholders)
    return rows


@pytest.mark.parametrize("counts", [(3,), (0, 2), (2, 0, 4), (0, 0)])
@pytest.mark.parametrize("gate", GATES)
def test_all_forms_of_input_give_the_published_visibility(gate: str | None, counts: tuple[int, ...]) -> None:
    ids, total = tiny_text(*counts), sum(counts)
    intervals, positions = published_offset("per_head", ids), [p.tolist() for p in published_offset(None, ids)]
    text: list[dict] = [
        {"input_ids": ids, "image_token_id": IMAGE_TOKEN},
        {"input_ids": ids, "media_offset": intervals},
        {"input_ids": ids, "media_offset": positions},
        {"position_ids": torch.arange(ids.shape[1])[None], "media_offset": intervals},
    ]
    delay = 0 if gate is None else 1
    for layout in [media_layout(gate, total_frames=total, **arguments) for arguments in text]:
        assert visible(layout) == rules(gate, ids)
        assert layout.frame_position.tolist() == [position + delay for row in positions for position in row]
        assert [stop - first for first, stop in layout.sample_range.tolist()] == [*counts]


@pytest.mark.parametrize("gate", GATES)
def test_frame_positions_follow_position_ids(gate: str | None) -> None:
    ids, position_ids = torch.tensor([[9, IMAGE_TOKEN, IMAGE_TOKEN, 9]]), torch.tensor([[0, 10, 20, 31]])
    text = {"input_ids": ids, "image_token_id": IMAGE_TOKEN, "position_ids": position_ids}
    for offset in (None, published_offset(gate, ids)):
        layout = media_layout(gate, total_frames=2, media_offset=offset, **text)
        assert layout.frame_position.tolist() == ([10, 20] if gate is None else [20, 31])


@pytest.mark.parametrize("gate", GATES)
def test_last_token_may_be_a_placeholder(gate: str | None) -> None:
    ids = torch.tensor([[9, 9, IMAGE_TOKEN], [9, IMAGE_TOKEN, 9]])
    for offset in (None, [[2], [1]]):
        layout = media_layout(gate, total_frames=2, input_ids=ids, image_token_id=IMAGE_TOKEN, media_offset=offset)
        first, stop = layout.rows(3, 2)
        assert first.tolist() == [[0, 0], [1, 1]] and stop.tolist() == [[1, 1], [2, 2]]


def test_rows_after_the_prompt_see_all_frames_and_beams_share_them() -> None:
    layout = media_layout("per_head", total_frames=3, input_ids=tiny_text(2, 1), image_token_id=IMAGE_TOKEN)
    first, stop = layout.rows(10, 4)
    assert torch.equal(first[:, :2], layout.first[:, 10:]) and torch.equal(stop[:, :2], layout.stop[:, 10:])
    assert first[:, 2:].tolist() == [[0, 0], [2, 2]] and stop[:, 2:].tolist() == [[2, 2], [3, 3]]
    beams = layout.repeat_samples(3)
    assert beams.total_frames == 3 and beams.sample_range.tolist() == [[0, 2]] * 3 + [[2, 3]] * 3
    assert torch.equal(beams.stop[2], layout.stop[0]) and torch.equal(beams.stop[3], layout.stop[1])


def test_offsets_of_repeated_samples_may_share_frames() -> None:
    ids = tiny_text(2, 1)
    offset = published_offset("per_head", ids).repeat_interleave(2, dim=0)
    layout = media_layout("per_head", total_frames=3, input_ids=ids.repeat_interleave(2, dim=0), media_offset=offset)
    assert layout.sample_range.tolist() == [[0, 2], [0, 2], [2, 3], [2, 3]]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("form", ["per_head", None])
def test_media_offset_overrides_the_placeholder_token(gate: str | None, form: str | None) -> None:
    ids = torch.full((1, 14), 9)
    ids[0, [0, 13]] = IMAGE_TOKEN
    starts = torch.zeros_like(ids)
    starts[0, [2, 7]] = IMAGE_TOKEN  # each placeholder is five tokens
    offset = published_offset(form, starts)
    layout = media_layout(gate, total_frames=2, input_ids=ids, image_token_id=IMAGE_TOKEN, media_offset=offset)
    assert visible(layout) == rules(gate, starts)
    assert layout.frame_position.tolist() == ([2, 7] if gate is None else [3, 8])


IDS = torch.tensor([[9, IMAGE_TOKEN, 9, IMAGE_TOKEN, 9], [9, 9, 9, IMAGE_TOKEN, 9]])
OFFSET = published_offset("per_head", IDS)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"total_frames": 2}, ShapeError, r"placeholders for 3 frames \(by sample: \[2, 1\]\), and 2 were passed"),
        ({"total_frames": 0}, ShapeError, "neither pixel_values nor image_embeds"),
        ({"image_token_id": None}, ConfigError, "pass media_offset"),
        ({"input_ids": None}, ShapeError, "pass input_ids or position_ids"),
        ({"position_ids": torch.zeros(2, 4, dtype=torch.long)}, ShapeError, r"position_ids has shape \(2, 4\)"),
        ({"gate": "auto"}, ConfigError, "gate is 'auto'; expected one of"),
        ({"media_offset": [[1, 3], [3]], "total_frames": 4}, ShapeError, "and 4 were passed"),
        ({"media_offset": [[1, 3, 3]]}, ShapeError, "1 lists for 2 samples"),
        ({"media_offset": [[3, 1], [3]]}, ShapeError, "of sample 0"),
        ({"media_offset": [[1, 3], [5]]}, ShapeError, "stay below 5"),
        ({"media_offset": torch.zeros(2, 4, 2)}, ShapeError, r"expected \(2, 5, 2\)"),
        ({"media_offset": OFFSET + 1}, ShapeError, "3 frames were passed"),
        ({"media_offset": OFFSET - 1}, ShapeError, "media_offset refers to frames -1"),
        ({"media_offset": OFFSET + 1, "total_frames": 4}, ShapeError, "no token attends to frame 0"),
        ({"media_offset": OFFSET, "total_frames": 4}, ShapeError, "no token attends to frame 3"),
        ({"gate": None, "media_offset": OFFSET[:1].expand(2, -1, -1)}, ShapeError, "no token attends to frame 2"),
        # one sample's offsets for both: the sample of each placeholder is ambiguous
        (
            {"gate": None, "media_offset": OFFSET[:1].expand(2, -1, -1), "total_frames": 2},
            *(ShapeError, "where each frame's placeholder is"),
        ),
        ({"gate": None, "media_offset": OFFSET[:, [2, 2, 3, 4, 4]]}, ShapeError, "where each frame's placeholder is"),
    ],
)
def test_inconsistent_arguments_of_layout_are_refused(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {"gate": "per_head", "total_frames": 3, "input_ids": IDS, "image_token_id": IMAGE_TOKEN} | changes
    with pytest.raises(error, match=message):
        media_layout(arguments.pop("gate"), **arguments)


@pytest.mark.parametrize(("short_run", "limit"), [(1, 40), (2, 1), (2, 40), (32, 1), (32, 40), (32, 1 << 24)])
def test_row_blocks_cover_every_row_once_with_bounded_masks(
    short_run: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper_attention, "SHORT_RUN", short_run)
    monkeypatch.setattr(hyper_attention, "MASK_ELEMENTS", limit)
    first = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 2]
    stop = [0, 0, 1, 2, 3, 3, 3, 3, 0, 4, 4, 5]
    blocks = hyper_attention.row_blocks(first, stop, tokens_per_frame=4)
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(len(first)))
    for block in blocks:
        rows = [set(range(first[row], stop[row])) for row in range(block.start, block.stop)]
        frames = set(range(block.first_frame, block.stop_frame))
        assert set().union(*rows) <= frames
        assert block.uniform == all(row == frames for row in rows)
        assert all(rows) or not any(rows)
        if not block.uniform:
            assert len(rows) * len(frames) * 4 <= limit
