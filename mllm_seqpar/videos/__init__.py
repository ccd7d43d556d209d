"""Videos and images: what a file shows, which frames are looked at, and their pixels.

Decoding, but not importing, needs the extra `video`.
"""
