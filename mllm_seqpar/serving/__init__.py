"""Interactive programs: a chat in the terminal, and a server with OpenAI's interface.

    mllm_seqpar.serving.chat:chat      a conversation about a video, in the terminal
    mllm_seqpar.serving.server:serve   /v1/chat/completions, /v1/files, /v1/models, /health, /metrics, and a page

Both start their own ranks (`cli.launch`). Rank 0 talks to the user and sends each job to the other ranks, and all
ranks run it (`jobs`), with the engine that `ask` has too (`inference.engine`).
"""
