"""Prints what one cross-attention layer sends, LV-XAttn against Ring Attention, as a markdown table for the README.

    python scripts/bench/traffic.py [--ranks 2 6 8 16]

Formulas only; `tests/attention/test_bytes_sent.py` holds them equal to the bytes that the transfer layer counts.
"""

from __future__ import annotations

import argparse

from mllm_seqpar.schedules.bytes_sent import Problem, expanded, lv_xattn_bytes, ring_bytes, video_mme


def row(problem: Problem, *, backward: bool) -> str:
    """One line: bytes per rank and layer of the three, and the two shares."""
    lv = sum(lv_xattn_bytes(problem, backward=backward).values())
    kept = sum(ring_bytes(problem, backward=backward).values())
    full = sum(ring_bytes(expanded(problem), backward=backward).values())
    megabytes = " | ".join(f"{x / 1e6:,.1f}" for x in (lv, kept, full))
    name = "backward" if backward else "forward"
    return f"| {problem.ranks} | {name} | {megabytes} | {lv / kept:.2%} | {lv / full:.2%} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 6, 8, 16])
    ranks = parser.parse_args().ranks
    print("Video-MME of the paper: 5,514 query rows, 1,739,394 keys, 28 heads, 4 KV heads, head dim 128.")
    print("bf16 Q, K, V; float32 O, log-sum-exp, dQ, dK, dV. MB sent per rank and layer.\n")
    print("| ranks | pass | LV-XAttn | Ring, GQA kept | Ring, heads expanded | of Ring, GQA kept | of Ring, expanded |")
    print("|---|---|---|---|---|---|---|")
    for n in ranks:
        for backward in (False, True):
            print(row(video_mme(n), backward=backward))


if __name__ == "__main__":
    main()
