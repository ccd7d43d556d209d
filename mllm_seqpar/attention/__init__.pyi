from .functional import decode_attention as decode_attention
from .functional import lv_xattn as lv_xattn
from .functional import mesh_attention as mesh_attention
from .functional import ring_attention as ring_attention
from .functional import ulysses_attention as ulysses_attention
