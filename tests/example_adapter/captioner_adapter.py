from functools import partial

import torch
from captioner import Captioner

from mllm_seqpar.adapting import ConfigError, FrameMask, frame_range, sharded_call, sharded_causal_lm_loss, shifted


class CaptionerAdapter:
    name = "Captioner"

    def matches(self, model):
        return isinstance(model, Captioner)

    def check(self, model, context):
        if context.config.self_attention == "local":
            raise ConfigError('self_attention="local": the text of a Captioner is always sharded')

    def install(self, model, context, patch):
        patch.set(model, "forward", partial(forward, model, context))
        for layer, (read, look) in enumerate(zip(model.read, model.look, strict=True)):
            patch.set(read, "forward", partial(read_sharded, read))
            patch.set(look, "forward", partial(look_sharded, look, layer))


def forward(model, context, ids, video, labels=None):
    (batch, length), (_, per_sample, patches, _) = ids.shape, video.shape
    # The frames of all samples form one list. A rank encodes its shard.
    # A token attends to the frames of its own sample.
    local = frame_range(batch * per_sample, context.comm)
    first = (torch.arange(batch) * per_sample)[:, None].expand(-1, length)
    mask = FrameMask.from_intervals(first, first + per_sample, patches, batch * per_sample)
    state = sharded_call(context, model.tower(video.flatten(0, 1)[local.start : local.stop]), mask)
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
    o = state.attend(q, [state.text_keys(q, k, v)], q.shape[-1] ** -0.5)
    return self.out(o.transpose(1, 2).flatten(2))


def look_sharded(self, layer, x, state):
    def project(features, index):  # (f, patches, C) -> k, v (1, H, f * patches, D), called again in backward
        y = features.flatten(0, 1)[None]
        return self.split(self.k(y)), self.split(self.v(y))

    q = self.split(self.q(x))
    keys = state.frame_keys(q, layer, project, [self.k, self.v])
    o = state.attend(q, [keys], q.shape[-1] ** -0.5)
    return self.out(o.transpose(1, 2).flatten(2))
