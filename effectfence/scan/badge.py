"""A badge, for a scan that saw everything: tools found, each bound to its code, nothing unseen."""

from __future__ import annotations

from effectfence.scan.model import Report

_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" \
aria-label="{label}: {says}">
<title>{label}: {says}</title>
<rect width="{left}" height="20" fill="#555"/>
<rect x="{left}" width="{right}" height="20" fill="#07c"/>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{left_middle}" y="14">{label}</text><text x="{right_middle}" y="14">{says}</text>
</g>
</svg>
"""


def refused(report: Report) -> str:
    """Why there is no badge; empty where there is one."""
    if not report.tools:
        return "no tools were recognised"
    unbound = [tool.name for tool in report.tools if tool.handler is None]
    if unbound:
        return f"the code of {unbound[0]} was not found"
    if report.unseen:
        first = report.unseen[0]
        return f"something stayed unseen: {first.place} {first.says}"
    return ""


def badge(report: Report) -> str:
    """The badge as SVG: how many tools, and how many of them write without a guard."""
    bare = sum(tool.candidate for tool in report.tools)
    says = f"{len(report.tools)} tools, {bare} unguarded"
    label = "effectfence scan"
    left, right = 7 * len(label) + 10, 7 * len(says) + 10
    return _TEMPLATE.format(
        label=label,
        says=says,
        left=left,
        right=right,
        width=left + right,
        left_middle=left // 2,
        right_middle=left + right // 2,
    )
