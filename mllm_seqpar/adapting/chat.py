"""The toolkit for the chat format of a family: `ChatFamily`; with tokens that stand for images, `ImageTokenFamily`."""

from mllm_seqpar.data.chat_family import VIDEO_MARK, ChatFamily, ChatText, FeatureFrames, Messages, known_processors
from mllm_seqpar.data.chat_format import media_of, media_parts
from mllm_seqpar.data.image_tokens import ImageTokenFamily, answer_spans, image_counts, to_pil_images, tokenize
from mllm_seqpar.data.reader import check_range
from mllm_seqpar.data.sources import FrameSource, ImageListSource, ImageTensorSource
