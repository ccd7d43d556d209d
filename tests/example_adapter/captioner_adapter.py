from functools import partial

import torch
from captioner import Captioner

from mllm_seqpar.adapting import Adapter, FrameMask, KVProjection, sharded_call, sharded_causal_lm_loss, shifted


class CaptionerAdapter(Adapter):
    name = "Captioner"

    def matches(self, model):
        return isinstance(model, Captioner)

    def install(self, model, context, patch):
        patch.set(model, "forward", partial(forward, model, context))
        for layer, (read, look) in enumerate(zip(model.read, model.look, strict=True)):
            patch.set(read, "forward", partial(read_sharded, read))
            patch.set(look, "forward", partial(look_sharded, look, layer))


def forward(model, context, ids, video, labels=None):
    (batch, length), (_, per_sample, patches, _) = ids.shape, video.shape
    # The frames of all samples form one list, and a token attends to those of its own sample.
    first = (torch.arange(batch) * per_sample)[:, None].expand(-1, length)
    mask = FrameMask.from_intervals(first, first + per_sample, patches, batch * per_sample)
    state = sharded_call(context, video.flatten(0, 1), mask, encode=model.tower)  # a rank encodes its shard
    # Tokens and positions are sharded in the same way. From here on, x is (B, s, C), the tokens of this rank.
    positions = state.text.shard(torch.arange(length, device=ids.device), 0)
    x = model.words(state.text.shard(ids, 1)) + model.places(positions)
    for read, look in zip(model.read, model.look, strict=True):
        x = x + read(x, state)
        x = x + look(x, state)
    logits = model.head(x)
    if labels is None:
        return state.text.unshard(logits, 1)
    # Labels are shifted before they are sharded, so that no target is lost at the boundary of two shards.
    return sharded_causal_lm_loss(logits, shifted(labels), state.text)


def read_sharded(self, x, state):
    q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
    return attend(self, q, state.text_keys(q, k, v), state)


def look_sharded(self, layer, x, state):
    q = self.split(self.q(x))
    return attend(self, q, state.frame_keys(q, layer, KVProjection((self.k, self.v), q.shape[-1])), state)


def attend(self, q, keys, state):
    return self.out(state.attend(q, [keys], q.shape[-1] ** -0.5).transpose(1, 2).flatten(2))
