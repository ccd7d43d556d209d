"""Print the bytes that one cross-attention layer sends, LV-XAttn against Ring Attention, as a Markdown table.

    python scripts/bench/traffic.py [--ranks 2 6 8 16]

The numbers follow from formulas, which tests compare with the bytes that the transport counts.
"""

from __future__ import annotations

import argparse

from mllm_seqpar.schedules.bytes_sent import Problem, expanded, lv_xattn_bytes, ring_bytes, video_mme


def row(problem: Problem, *, backward: bool) -> str:
    """Return one line: MB per rank and layer of LV-XAttn and of both rings, and LV-XAttn's percentage of each ring."""
    formulas = ((lv_xattn_bytes, problem), (ring_bytes, problem), (ring_bytes, expanded(problem)))
    sent = [sum(formula(call, backward=backward).values()) for formula, call in formulas]
    cells = [*(f"{x / 1e6:,.1f}" for x in sent), *(f"{sent[0] / x:.2%}" for x in sent[1:])]
    return f"| {problem.ranks} | {'backward' if backward else 'forward'} | {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 6, 8, 16])
    ranks = parser.parse_args(argv).ranks
    print("Video-MME of the paper: 5,514 query rows, 1,739,394 keys, 28 heads, 4 KV heads, head dim 128.")
    print("bf16 Q, K, V; float32 O, log-sum-exp, dQ, dK, dV. MB sent per rank and layer.\n")
    print("| ranks | pass | LV-XAttn | Ring, GQA | Ring, expanded heads | of Ring, GQA | of Ring, expanded |")
    print("|---|---|---|---|---|---|---|")
    for n in ranks:
        for backward in (False, True):
            print(row(video_mme(n), backward=backward))


if __name__ == "__main__":
    main()
