"""What the tests of Llama 3.2 Vision run: cases by name, which ranks find here."""

from dataclasses import replace
from typing import Any

from tiny_mllama import Case, inputs_of, local_frames, model_of, unpatched_generate
from transformers.cache_utils import DynamicLayer

__all__ = ["EVERYWHERE", "GENERATED", "ONCE", "inputs_of", "local_frames", "model_of", "unpatched_generate"]

UNEVEN = ((2, 3, 1), (1,))
TEXT = ((), ())

EVERYWHERE = {
    "one sample": Case(),
    "two samples, uneven": Case(images=UNEVEN),
    "a sample without images, holes": Case(images=((), (3, 1)), mask="scattered"),
    "one image, short text": Case(images=((2,),), length=4),
    "no mask": Case(images=((2, 1),), mask="none"),
    "text only": Case(images=TEXT),
    "left padding": Case(images=((2, 3), (1,), (3,)), padding="left"),
}
"""For 1 to 4 ranks; with one image, all ranks but the first are without."""

ONCE = {
    "no mask, two samples": Case(images=UNEVEN, mask="none"),
    "no mask, right padding": Case(images=UNEVEN, mask="none", padding="right"),
    "any tiles at all": Case(images=((3, 2, 3), (1, 3)), mask="scattered", length=17),
    "right padding": Case(images=UNEVEN, padding="right"),
    "text shorter than the group": Case(images=((2,), (1,)), length=3),
    "few targets": Case(images=UNEVEN, targets="few"),
    "labels shifted by the caller": Case(images=UNEVEN, targets="shifted"),
    "items counted by the caller": Case(images=UNEVEN, arguments={"num_items_in_batch": 37}),
    "cross-attention last": Case(model={"cross_attention_layers": (2, 4)}),
    "gradients of pixels": Case(images=UNEVEN, wants_grad=("pixel_values",)),
    "states": Case(images=UNEVEN, features="tiles", wants_grad=("cross_attention_states",)),
    "states by samples": Case(images=UNEVEN, features="sample", wants_grad=("cross_attention_states",)),
    "states without a mask": Case(images=UNEVEN, features="sample", mask="none"),
    "embeddings": Case(images=UNEVEN, embeds=True, wants_grad=("inputs_embeds",)),
    "own images only": Case(images=UNEVEN, local_frames=True),
    "own images only, one image, no mask": Case(images=((3,),), mask="none", local_frames=True),
    "own states only": Case(images=UNEVEN, features="tiles", local_frames=True),
    "ring": Case(images=UNEVEN).with_options(strategy="ring"),
    "ring, nothing recomputed": Case(images=UNEVEN, mask="scattered").with_options(
        strategy="ring", recompute_visual=False
    ),
    "nothing recomputed, contiguous": Case(images=UNEVEN).with_options(
        recompute_visual=False, text_layout="contiguous"
    ),
    "striped": Case(images=UNEVEN, padding="left").with_options(text_layout="striped"),
    "local text": Case(images=UNEVEN, padding="left").with_options(self_attention="local"),
    "local text, ring, holes": Case(images=UNEVEN, mask="scattered").with_options(
        self_attention="local", strategy="ring"
    ),
    "local text only": Case(images=TEXT).with_options(self_attention="local"),
    "full logits in training": Case(images=UNEVEN).with_options(logits="full"),
    "no labels": Case(images=UNEVEN, labels=False),
    "training mode": Case(images=UNEVEN, train=True),
}
"""Each with one number of ranks, 2 to 4 in turn."""

ONE = Case(labels=False)
TWO = Case(images=UNEVEN, padding="left", labels=False)
HOLES = Case(images=UNEVEN, mask="scattered", labels=False)
NO_MASK = Case(images=UNEVEN, mask="none", labels=False)
OWN = Case(images=UNEVEN, labels=False, local_frames=True)
OWN_NO_MASK = Case(images=((3, 1), (1, 2)), labels=False, local_frames=True, mask="none")
WORDS = Case(images=TEXT, labels=False)
STATES = Case(images=UNEVEN, features="sample", labels=False)
LOOK_UP = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}
DEALT = {"shard_prompt_from": 2}
STATIC = {"cache_implementation": "static"}
BEAMS = {"num_beams": 2, "num_return_sequences": 2}

GENERATED: dict[str, tuple[Case, dict[str, Any]]] = {
    "greedy": (ONE, {}),
    "greedy, padded batch": (TWO, {}),
    "holes": (HOLES, {}),
    "no mask": (NO_MASK, {}),
    "sampled": (TWO, {"do_sample": True, "temperature": 1.3, "top_k": 50}),
    "beams": (ONE, {"num_beams": 3}),
    "beams, padded batch": (TWO, BEAMS),
    "beams, no mask": (NO_MASK, BEAMS),
    "no cache": (TWO, {"use_cache": False}),
    "no cache, beams": (HOLES, {"use_cache": False, "num_beams": 2}),
    "static cache": (TWO, STATIC),
    "static cache, beams": (HOLES, STATIC | BEAMS),
    "static cache, text only": (WORDS, STATIC),
    "text only": (WORDS, {}),
    "text only, no cache": (WORDS, {"use_cache": False}),
    "embeddings": (Case(images=UNEVEN, embeds=True, labels=False), {}),
    "states": (STATES, {}),
    "states, beams": (STATES, {"num_beams": 3}),
    "states, beams, no cache": (STATES, BEAMS | {"use_cache": False}),
    "own states only, beams": (replace(STATES, local_frames=True), BEAMS),
    "local text": (TWO.with_options(self_attention="local"), {}),
    "ring": (HOLES.with_options(strategy="ring"), {}),
    "dealt prompt": (TWO.with_options(**DEALT), {}),
    "dealt prompt, beams": (HOLES.with_options(**DEALT), {"num_beams": 3}),
    "dealt prompt, text only": (WORDS.with_options(**DEALT), {}),
    "own images only": (OWN, {}),
    "own images only, beams": (OWN, BEAMS),
    "own images only, beams, no mask": (OWN_NO_MASK, BEAMS),
    "own images only, embeddings": (Case(images=UNEVEN, embeds=True, labels=False, local_frames=True), BEAMS),
    "own images only, no cache, beams": (OWN, BEAMS | {"use_cache": False}),
}


def _can_look_up() -> bool:
    """Older versions of transformers cannot take back a token in a layer that has cached nothing."""
    try:
        DynamicLayer().crop(-1)
    except TypeError:
        return False
    return True


if _can_look_up():
    GENERATED |= {
        "looked up": (ONE, LOOK_UP),
        "looked up, holes": (Case(mask="scattered", labels=False), LOOK_UP),
        "looked up, text only": (Case(images=((),), labels=False), LOOK_UP),
        "dealt prompt, looked up": (ONE.with_options(**DEALT), LOOK_UP),
    }
