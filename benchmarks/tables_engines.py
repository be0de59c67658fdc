"""Tables about engines: the embedded one, the server, SGLang."""

from __future__ import annotations

from tables_common import SETS, markdown, result, span


def cpu_decode() -> str:
    report = result("cpu_decode")
    rows = []
    for name, arm in report["arms"].items():
        ratio = arm["speed_up_over_plain"]
        dtype, arm_name = name.split("/")
        rows.append(
            [
                f"{arm_name.replace('hf', 'Hugging Face generate').replace('plain', 'plain decode')}, {dtype}",
                f"{arm['tokens_per_second']['value']:.1f}",
                span(ratio),
                f"{arm['acceptance_length']:.2f}",
                f"{arm['milliseconds_per_round']:.1f}",
            ]
        )
    table = markdown(("", "tokens/s, median", "over plain decode of that dtype", "acceptance", "ms/round"), rows)
    told = {
        "plain_over_hf": "our fastest plain decode over Hugging Face at its best",
        "tree_over_plain": "our best tree over our fastest plain decode",
        "tree_over_chain": "our best tree over our best chain",
    }
    figures = [
        f"{words}: **{f['value']:.2f}** [{f['low']:.2f}, {f['high']:.2f}]"
        for key, words in told.items()
        if (f := report["summary"][key])
    ]
    return (
        f"{report['prompts']} {SETS[report['task']]} prompts, {report['max_tokens']} new tokens, greedy; arms "
        "take turns; threads chosen for each arm by measurement; 95 % intervals over prompts.\n\n"
        f"{table}\nMedian ratio per prompt: {'; '.join(figures)}.\n"
    )


def parity() -> str:
    report = result("parity")
    rows = []
    for dtype in ("float32", "bfloat16"):
        for name, tally in report[dtype].items():
            what = "plain decode, batch of 2" if name == "batch-2" else f"{name.removeprefix('rows-')} rows"
            rows.append(
                [
                    f"{dtype}, {what}",
                    str(tally["positions"]),
                    f"{tally['flips']} ({tally['flips_per_1000']:.1f})",
                    str(tally["exact_ties"]),
                    str(tally["unexplained"]),
                    f"{tally['largest_difference']:.2g}",
                ]
            )
    header = (
        "against plain decode",
        "positions",
        "flips (per 1,000)",
        "exact ties",
        "unexplained",
        "max difference",
    )
    return markdown(header, rows)


def serving() -> str:
    report = result("serving")
    rows = []
    plain = {c["concurrency"]: c["tokens_per_second"] for c in report["cells"] if c["mode"] == "off"}
    for c in sorted(report["cells"], key=lambda c: (c["concurrency"], c["mode"] != "off", c["mode"])):
        rows.append(
            [
                f"{c['concurrency']}, {c['mode']}",
                f"{c['tokens_per_second']:.1f}",
                f"{c['tokens_per_second'] / plain[c['concurrency']]:.2f}",
                f"{c['acceptance_length']:.2f}",
                f"{c['first_token_s']['p50']:.2f} / {c['first_token_s']['p90']:.2f}",
                f"{1000 * c['per_token_s']['p50']:.0f} / {1000 * c['per_token_s']['p90']:.0f}",
            ]
        )
    header = (
        "concurrency, mode",
        "tokens/s, all together",
        "over off",
        "acceptance",
        "first token, s (p50 / p90)",
        "ms per token (p50 / p90)",
    )
    over = report["overload"]
    told = (
        f"{over['sent']} requests at once, four times the {over['capacity']} that may run and wait: "
        f"{over['accepted']} answered, {over['refused_429']} told 429 (half of them within "
        f"{over['refused_after_s']['p50']:.2f} s), {over['other']} anything else.\n"
    )
    return markdown(header, rows) + "\n" + told


def sglang_right() -> str:
    report = result("sglang_gpu")
    rows = []
    for name, arm in report["arms"].items():
        found = arm.get("against_plain") or arm["control"]
        rows.append(
            [
                "plain, one request at a time (the control)" if name == "plain" else name,
                f"{found['divergences']} in {found['tokens']:,} ({found['per_1000']:.1f} per 1,000)",
                str(found.get("unexplained", "")),
                f"{found['chance']:.2f}" if "chance" in found else "",
                f"{found['largest_difference']:.2f}",
            ]
        )
    header = ("against plain, many at a time", "divergences", "not rounding", "by chance", "largest difference")
    return markdown(header, rows)


def sglang_speed() -> str:
    arms = result("sglang_gpu")["arms"]
    sets = list(SETS)
    rows = []
    for concurrency, plain in arms["plain"]["speed"].items():
        for name, arm in arms.items():
            found = arm["speed"][concurrency]
            rows.append(
                [
                    f"{concurrency}, {name}",
                    " / ".join(f"{found[s]['tokens_per_round']:.2f}" for s in sets),
                    " / ".join(f"{found[s]['ms_per_round']:.1f}" for s in sets),
                    " / ".join(f"{found[s]['tokens_per_s']['value']:,.0f}" for s in sets),
                    " / ".join(
                        f"{found[s]['tokens_per_s']['value'] / plain[s]['tokens_per_s']['value']:.2f}"
                        for s in sets
                    ),
                ]
            )
    header = ("requests at once, arm", "tokens a round", "ms a round", "tokens/s", "over plain")
    return markdown(header, rows)


def sglang_stages() -> str:
    arms = {name: arm["stages"] for name, arm in result("sglang_gpu")["arms"].items() if "stages" in arm}
    stages = ("draft", "candidates", "tree", "verify", "choose", "commit")
    rows = [[name, *(f"{arm[f'ddtree.{stage}']:.1f}" for stage in stages)] for name, arm in arms.items()]
    return markdown(("ms of a round, profiled", *stages), rows)
