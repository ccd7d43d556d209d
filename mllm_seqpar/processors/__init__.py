"""The processors of the native models, which turn chats with images and videos into the arguments of a model."""
