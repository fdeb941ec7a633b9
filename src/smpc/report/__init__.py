"""Reports of a plan: on the terminal, as a page, for Perfetto, as a picture; two plans compared; a plan predicted again."""

from smpc.report.format import compress, format_bytes, format_number, format_time, printable
from smpc.report.terminal import compact_timeline, print_report, render

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
