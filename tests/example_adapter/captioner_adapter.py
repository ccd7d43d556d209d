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
            raise ConfigError('self_attention="local": the text of a Captioner is always dealt to the ranks')

    def install(self, model, context, patch):
        patch.set(model, "forward", partial(forward, model, context))
        for layer, (read, look) in enumerate(zip(model.read, model.look, strict=True)):
            patch.set(read, "forward", partial(read_sharded, read))
            patch.set(look, "forward", partial(look_sharded, look, layer))


def forward(model, context, ids, video, labels=None):
    (batch, length), (_, per_sample, patches, _) = ids.shape, video.shape
    # All frames of all samples are one list. A rank encodes its own; a text row sees those of its own sample.
    own = frame_range(batch * per_sample, context.comm)
    first = (torch.arange(batch) * per_sample)[:, None].expand(-1, length)
    mask = FrameMask.from_intervals(first, first + per_sample, patches, batch * per_sample)
    call = sharded_call(context, model.tower(video.flatten(0, 1)[own.start : own.stop]), mask)
    # Tokens and their places are dealt to the ranks alike; from here on x is (B, s, C), the rows of this rank.
    places = call.text.shard(torch.arange(length, device=ids.device), 0)
    x = model.words(call.text.shard(ids, 1)) + model.places(places)
    for read, look in zip(model.read, model.look, strict=True):
        x = x + read(x, call)
        x = x + look(x, call)
    logits = model.head(x)
    # Labels are shifted before they are dealt, so that no target is lost where the rows of two ranks meet.
    return (
        call.text.unshard(logits, 1) if labels is None else sharded_causal_lm_loss(logits, shifted(labels), call.text)
    )


def read_sharded(self, x, call):
    q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
    o = call.attend(q, [call.text_keys(k, v)], q.shape[-1] ** -0.5)
    return self.out(o.transpose(1, 2).flatten(2))


def look_sharded(self, layer, x, call):
    def project(features, index):  # (f, patches, C) -> k, v (1, H, f * patches, D), again in the backward pass
        y = features.flatten(0, 1)[None]
        return self.split(self.k(y)), self.split(self.v(y))

    q = self.split(self.q(x))
    o = call.cross_attend(q, layer, project, [self.k, self.v], q.shape[-1] ** -0.5)
    return self.out(o.transpose(1, 2).flatten(2))
