"""The pictures of what happened: plots and tables for the terminal, drawn from plain numbers."""

from syncline.report.terminal import draw_line_plot, format_rates, link_table, network_links

__all__ = ["draw_line_plot", "link_table", "network_links", "format_rates"]
