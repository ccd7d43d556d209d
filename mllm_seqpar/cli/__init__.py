"""What the entry scripts share, whether they train or answer.

Options from a dataclass (`options`), the device and its time limit (`devices`), loading (`loading`), steps that all
ranks take together or not at all (`together`), reading ahead (`prefetch`), peak memory (`memory`), progress bars
(`progress`), and how a run ends when something goes wrong (`failure`).
"""
