"""The table as text for people: Markdown, and LaTeX for papers."""

import html
import re
from collections.abc import Iterable
from typing import Any

from anomed.report import summary
from anomed.report.summary import Block


def markdown(blocks: list[Block], cards: dict[str, Any]) -> str:
    """table.md: one table per domain and level, the data behind it, the reasons of what is missing, the definitions."""
    lines = ["# Benchmark table", "", _md(summary.LEGEND)]
    domain = ""
    for block in blocks:
        if block.domain != domain:
            domain, card = block.domain, cards[block.domain]
            lines += ["", f"## {_md(domain)}", "", f"Data: {_md(summary.provenance(card))}."]
            lines += ["", f"Images: {_md(summary.counts(card))}."]
            for text in summary.problems(card):
                lines += ["", f"Warning: {_md(text)}."]
        lines += ["", f"### {block.title()}"]
        notes, columns = block.notes(), block.columns()
        if columns:
            kept = ["epoch kept"] * bool(block.selection)
            header = ["system", *kept, "seeds", *(_md(block.header(metric)) for metric in columns)]
            lines += ["", _md_row(header), _md_row([*[":--"] * (1 + len(kept)), "--:", *["--:"] * len(columns)])]
            for system, seeds in block.seeds.items():
                cells = (_cell(block, system, metric, _md, "**{}**") for metric in columns)
                lines.append(_md_row([_md(block.name(system)), *block.kept(system), str(len(seeds)), *cells]))
        for text in block.below():
            lines += ["", f"{_md(text)}."]
        if notes:
            lines += ["", *(f"- [{number}] {_md(note)}" for note, number in notes.items())]
    lines += ["", "## Definitions", ""]
    for facts in definitions(blocks).values():
        name = f"**{_md(facts['label'])}** (`{facts['definition_id']}`)"
        lines.append(f"- {name}: {_md(facts['definition'])} Source: {_md(facts['source'])}.")
    return "\n".join(lines) + "\n"


def latex(blocks: list[Block], cards: dict[str, Any]) -> str:
    """table.tex: one booktabs tabular per domain and level, with the same notes; needs booktabs and UTF-8 input."""
    lines = [
        "% Written by `anomed table`. Needs \\usepackage{booktabs}.",
        f"{{\\footnotesize {_tex(summary.LEGEND)}\\par}}",
    ]
    for block in blocks:
        card, notes, columns = cards[block.domain], block.notes(), block.columns()
        title = f"{block.domain}, {block.title().lower()}"
        lines += ["", f"% {title}: {' '.join(summary.provenance(card).split())}"]
        if columns:
            kept = ["epoch kept"] * bool(block.selection)
            header = [_tex(title), *kept, *(_tex(block.header(metric)) for metric in columns)]
            form = "l" * (1 + len(kept)) + "r" * len(columns)
            lines += [f"\\begin{{tabular}}{{{form}}}", "\\toprule", _tex_row(header), "\\midrule"]
            for system in block.seeds:
                cells = (_cell(block, system, metric, _tex, "\\textbf{{{}}}") for metric in columns)
                lines.append(_tex_row([_tex(block.name(system)), *block.kept(system), *cells]))
            lines += ["\\bottomrule", "\\end{tabular}", ""]
        lines += [f"{{\\footnotesize {_tex(title)}. Data: {_tex(summary.provenance(card))}."]
        lines += [f"{_tex(text)}." for text in summary.problems(card) + block.below()]
        lines += [f"[{number}] {_tex(note)}." for note, number in notes.items()]
        lines += ["\\par}"]
    return "\n".join(lines) + "\n"


def definitions(blocks: Iterable[Block]) -> dict[str, dict[str, Any]]:
    """The facts of every metric, in the order of the blocks."""
    return {metric: facts for block in blocks for metric, facts in block.metrics.items()}


def _cell(block: Block, system: str, metric: str, escape: Any, bold: str) -> str:
    """`0.9321 ± 0.0091 [0.880, 0.971] ≈ [1]`, each part only where it holds."""
    cell = block.cells[system, metric]
    value = escape(f"{cell.value()} {cell.spread()}")
    parts = [bold.format(value) if system in block.best(metric) else value, cell.interval()]
    parts.append(escape(summary.SIGN) if system in block.alike(metric) else "")
    parts.append(f"[{block.notes()[cell.note()]}]" if cell.note() else "")
    return " ".join(part for part in parts if part)


def _md_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md(text: str) -> str:
    """Plain text as Markdown: on one line, nothing in it is markup."""
    one_line = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\\`*|\[\]]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", one_line)


def _tex_row(cells: list[str]) -> str:
    return f"{' & '.join(cells)} \\\\"


_TEX = {
    "\\": "\\textbackslash{}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "\\textless{}",
    ">": "\\textgreater{}",
    "↑": "$\\uparrow$",
    "↓": "$\\downarrow$",
    "±": "$\\pm$",
    "–": "--",
    "≈": "$\\approx$",
    "≥": "$\\geq$",
    "†": "\\dag{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _tex(text: str) -> str:
    """Plain text as LaTeX: on one line, every special character escaped."""
    return "".join(_TEX.get(character, character) for character in " ".join(text.split()))
