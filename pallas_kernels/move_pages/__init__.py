"""Keys and values that move from page to page, in place."""

from pallas_kernels.move_pages.api import move_pages


__all__ = ["move_pages"]
