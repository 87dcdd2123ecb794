"""The pictures of what happened: plots and tables for the terminal, drawn from plain numbers."""

from syncline.report.line_plot import draw_line_plot
from syncline.report.link_table import format_rates, link_table, network_links

__all__ = ["draw_line_plot", "link_table", "network_links", "format_rates"]
