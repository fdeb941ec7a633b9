"""Reports of a plan: on the terminal, as a page, for Perfetto, as a picture; two plans compared; a plan predicted again."""

from smpc.report.drawing import compact_timeline
from smpc.report.format import compress, format_bytes, format_number, format_time, printable
from smpc.report.terminal import print_report, render

__all__ = [
    "compact_timeline",
    "compress",
    "format_bytes",
    "format_number",
    "format_time",
    "print_report",
    "printable",
    "render",
]
