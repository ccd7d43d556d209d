"""Layer: one process. mPLUG-Owl3 against a dense float64 computation that shares no code (`mplug_owl3_reference`)."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from mllm_seqpar._compat import cache_of
from mllm_seqpar.models.mplug_owl3 import hyper_attention
from model_copies import tiny_model
from mplug_owl3_reference import Numbers, reference_logits, reference_loss
from outcomes import worst_gradient
from tiny_models.mplug_owl3 import GATES, IMAGE_TOKEN, media_offset, tiny_frames, tiny_text
from tolerances import AGAINST_UNPATCHED, relative_error

pytestmark = pytest.mark.rounding

# float32 against float64 through 4 layers: 2e-6 in gradients, less in logits. A wrong mask or position gives 1e-2.
TOLERANCE = 5e-6


def numbers(model: torch.nn.Module) -> Numbers:
    config = model.config
    return Numbers(
        gate=config.gate,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        hyper_layers=tuple(config.hyper_layers),
        vision_heads=config.vision_config.num_attention_heads,
        vision_layers=config.vision_config.num_hidden_layers,
        layers=config.num_hidden_layers,
    )


def double_state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().double() for name, value in model.state_dict().items()}


def expected(model: torch.nn.Module, input_ids: Tensor, frames: Tensor, state: dict | None = None) -> list[Tensor]:
    """Return the logits of each sample computed separately; each placeholder takes the next frame of the flat list."""
    state = double_state(model) if state is None else state
    logits, used = [], 0
    for sample in input_ids.tolist():
        at = [position for position, token in enumerate(sample) if token == IMAGE_TOKEN]
        sample_frames = frames[used : used + len(at)].to(next(iter(state.values())).dtype)
        used += len(at)
        logits.append(reference_logits(state, numbers(model), sample, at, sample_frames))
    return logits


def assert_exact(logits: Iterable[Tensor], references: list[Tensor]) -> None:
    for found, reference in zip(logits, references, strict=True):
        assert relative_error(found, reference) < TOLERANCE


@pytest.mark.parametrize("counts", [(0, 3), (1, 0, 5), (0, 0), "at the start", "at the end"], ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_logits_equal_reference(gate: str | None, counts: tuple[int, ...] | str) -> None:
    model, ids = tiny_model(gate), tiny_text(0) if isinstance(counts, str) else tiny_text(*counts)
    if isinstance(counts, str):
        ids[0, {"at the start": [0, 1, 5], "at the end": [9, 10, 11]}[counts]] = IMAGE_TOKEN
    frames = tiny_frames(int((ids == IMAGE_TOKEN).sum()))
    assert_exact(model(ids, frames).logits, expected(model, ids, frames))


@pytest.mark.parametrize("gate", GATES)
def test_published_inputs_equal_reference(gate: str | None) -> None:
    """Placeholders are five ordinary tokens each; only media_offset, in either form, determines the frames."""
    model = tiny_model(gate, image_token_id=None)
    ids, frames = tiny_text(0, 0, 0, length=20), tiny_frames(5)
    starts = [[2, 7, 12], [], [0, 15]]
    marked = torch.zeros_like(ids)
    for sample, at in enumerate(starts):
        marked[sample, at] = IMAGE_TOKEN
    references = [
        reference_logits(double_state(model), numbers(model), row, at, part.double())
        for row, at, part in zip(ids.tolist(), starts, frames.split([3, 0, 2]), strict=True)
    ]
    for form in ("per_head", None):
        assert_exact(model(ids, frames, media_offset=media_offset(form, marked)).logits, references)


@pytest.mark.parametrize("gate", GATES)
def test_row_blocks_do_not_change_logits(gate: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long runs of equal rows have no mask, and other rows have masks of bounded size."""
    monkeypatch.setattr(hyper_attention, "SHORT_RUN", 4)
    monkeypatch.setattr(hyper_attention, "MASK_ELEMENTS", 3 * 5 * 4)
    model = tiny_model(gate)
    ids = tiny_text(9, 0, 7, length=40)
    ids[0, 30:] = 7  # a long run with one interval after the frames
    frames = tiny_frames(int((ids == IMAGE_TOKEN).sum()))
    assert_exact(model(ids, frames).logits, expected(model, ids, frames))


@pytest.mark.parametrize(("side", "attention"), [("left", "sdpa"), ("right", "eager")])
@pytest.mark.parametrize("gate", GATES)
def test_padding_does_not_change_logits(gate: str | None, side: str, attention: str) -> None:
    model = tiny_model(gate)
    model.set_attn_implementation(attention)
    samples = [tiny_text(3, length=12, seed=1), tiny_text(2, length=7, seed=2), tiny_text(0, length=9, seed=3)]
    frames, ids, rows = tiny_frames(5), torch.zeros(3, 12, dtype=torch.long), []
    mask = torch.zeros_like(ids)
    for index, sample in enumerate(samples):
        length = sample.shape[1]
        rows.append(slice(12 - length, 12) if side == "left" else slice(0, length))
        ids[index, rows[-1]], mask[index, rows[-1]] = sample[0], 1
    references = [expected(model, *pair)[0] for pair in zip(samples, frames.split([3, 2, 0]), strict=True)]
    for position_ids in ((mask.cumsum(1) - 1).clamp(min=0), None):  # only differences of rotary positions matter
        logits = model(ids, frames, attention_mask=mask, position_ids=position_ids).logits
        assert_exact([row[real] for row, real in zip(logits, rows, strict=True)], references)


@pytest.mark.parametrize("gate", GATES)
def test_loss_and_gradients_equal_reference(gate: str | None) -> None:
    model = tiny_model(gate)
    ids, frames = tiny_text(3, 0, 2), tiny_frames(5).requires_grad_()
    labels = ids.clone()
    labels[0, :4] = labels[2, 6:9] = -100
    loss = model(ids, frames, labels=labels).loss
    loss.backward()

    state = {name: value.requires_grad_() for name, value in double_state(model).items()}
    copied = frames.detach().double().requires_grad_()
    reference = reference_loss(expected(model, ids, copied, state), labels.tolist())
    reference.backward()

    assert abs(loss.item() - reference.item()) < TOLERANCE * reference.item()
    assert relative_error(frames.grad, copied.grad) < TOLERANCE
    found, exact = ({name: x.grad for name, x in named} for named in (model.named_parameters(), state.items()))
    worst, name = worst_gradient(found, {name: exact[name] for name in found})
    assert worst < TOLERANCE, name


def test_last_vision_layer_is_not_computed() -> None:
    model = tiny_model("per_head")
    ids, frames = tiny_text(2), tiny_frames(2)
    before = model(ids, frames).logits
    with torch.no_grad():
        for name, weight in model.vision_model.named_parameters():
            if name.startswith(("encoder.layers.2.", "post_layernorm", "head")):
                weight.fill_(float("nan"))
    assert torch.equal(model(ids, frames).logits, before)


def test_shifted_labels_and_item_count_give_the_same_loss() -> None:
    model = tiny_model("vector")
    ids, frames = tiny_text(3, 1), tiny_frames(4)
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < 5, -100)
    loss = model(ids, frames, labels=labels).loss
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    assert torch.equal(model(ids, frames, shift_labels=shifted).loss, loss)
    targets = int((shifted != -100).sum())
    by_count = model(ids, frames, labels=labels, num_items_in_batch=4 * targets).loss
    assert torch.allclose(by_count, loss / 4)


@pytest.mark.slow
@pytest.mark.parametrize(("gate", "attention"), [("per_head", "eager"), ("vector", "sdpa"), (None, "sdpa")])
def test_bfloat16_and_autocast_errors_are_bounded(gate: str | None, attention: str) -> None:
    model = tiny_model(gate)
    model.set_attn_implementation(attention)
    ids, frames = tiny_text(4, 2), tiny_frames(6)
    reference = torch.stack(expected(model, ids, frames))
    rounded = {name: value.bfloat16() for name, value in model.state_dict().items()}
    allowed = AGAINST_UNPATCHED * relative_error(torch.stack(expected(model, ids, frames, rounded)), reference)
    for inputs in ({"pixel_values": frames}, {"image_embeds": model.encode_frames(frames).detach()}):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(ids, labels=ids, **inputs)
        assert relative_error(output.logits, reference) < allowed
        model.zero_grad()
        output.loss.backward()
        gradient = model.language_model.model.layers[0].self_attn.v_kv_proj.weight.grad
        assert gradient.dtype == torch.float32 and bool(gradient.isfinite().all()) and gradient.norm() > 0
    model.set_attn_implementation("sdpa")
    logits = model.bfloat16()(ids, frames.bfloat16()).logits
    assert logits.dtype == torch.bfloat16 and relative_error(logits, reference) < allowed


@pytest.mark.slow
@pytest.mark.parametrize("gate", GATES)
def test_gradient_checkpointing_does_not_change_gradients(gate: str | None) -> None:
    ids, frames = tiny_text(3, 2), tiny_frames(5)
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(gate).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        output = model(ids, frames, labels=ids)
        assert (cache_of(output) is None) == checkpointing
        output.loss.backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters()})
    assert worst_gradient(*gradients)[0] == 0
