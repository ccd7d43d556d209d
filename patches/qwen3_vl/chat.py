"""The chat format of Qwen3-VL, whose videos have a timestamp before each temporal patch."""

from ..qwen_vl_chat import QwenVLChats


class Qwen3VLChats(QwenVLChats):
    """`Qwen3VLProcessor` and `Qwen3VLForConditionalGeneration`."""

    model_class = "Qwen3VLForConditionalGeneration"
    budget_of_video = True


chat_family = Qwen3VLChats
