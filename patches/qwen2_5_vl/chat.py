"""The chat format of Qwen2.5-VL."""

from ..qwen_vl_chat import QwenVLChats


class Qwen2_5_VLChats(QwenVLChats):
    """`Qwen2_5_VLProcessor` and `Qwen2_5_VLForConditionalGeneration`."""

    model_class = "Qwen2_5_VLForConditionalGeneration"
    passes_times = True


chat_family = Qwen2_5_VLChats
