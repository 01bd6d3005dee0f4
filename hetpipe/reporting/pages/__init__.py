"""A run as one page for a browser, which loads nothing from anywhere."""

from hetpipe.reporting.pages.page_data import live_data, page_data, tokens_of_sample
from hetpipe.reporting.pages.page_text import page_text, write_page

__all__ = ["live_data", "page_data", "page_text", "tokens_of_sample", "write_page"]
