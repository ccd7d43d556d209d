"""Videos and images: what a file shows, which frames are looked at, and their pixels.

Decoding, but not importing, needs the extra `video`. From a file to pixels:

    media_files, downloads      a name or URL -> the file
    container                   the file -> its video stream and packets
    packets, shown_frames       what packets tell; what a decoder shows, if they cannot be trusted
    video                       `VideoInfo`: which frames there are, at which times
    frame_choice                `FrameChoice` and `plan_frames`: which of them are used, a `FramePlan`
    cursors, rgb                the decoded frame of each entry of a plan; its RGB image
    reader, torchcodec_reader   `read_frames`: the images of a plan, on several threads
"""
