"""The toolkit for the chat format of a family: `ChatFamily`; with tokens that stand for images, `ImageTokenFamily`."""

from mllm_seqpar.data.chat_family import (
    VIDEO_MARK,
    ChatFamily,
    ChatText,
    ImageTokenFamily,
    Messages,
    answer_spans,
    image_counts,
    known_processors,
    tokenize,
)
from mllm_seqpar.data.formats import media_of, media_parts
from mllm_seqpar.data.images import to_pil_images
from mllm_seqpar.data.reader import check_range
from mllm_seqpar.data.sources import FeatureFrames, FrameSource, ImageListSource, ImageTensorSource
