"""The frame of the pictures of these pages, and their colors where pages are dark."""

from collections.abc import Iterable


INK, GRAY, PALE = "#1d2733", "#5b6775", "#e3e8ee"

_DARK = {
    'rect[fill="#fff"]': "#14181e",
    f'text[fill="{INK}"],path[fill="{INK}"]': "#e6e9ee",
    f'rect[fill="{INK}"]': "#4a5563",
    f'rect[fill="{PALE}"]': "#2b323b",
    f'text[fill="{GRAY}"]': "#a7b0bb",
    # Boxes with words in them, and lines.
    'rect[fill="#b9c0c9"]': "#4a5563",
    'rect[fill="#6ba6df"]': "#2f6ba3",
    'rect[fill="#7cbf75"]': "#3d7a37",
    'rect[fill="#f2a95c"]': "#a8611a",
}


def document(
    width: float, height: float, parts: Iterable[str], *, size: int = 13
) -> str:
    """A picture of this size, in units of its coordinates, with text of `size`."""
    dark = "".join(f"{where}{{fill:{color}}}" for where, color in _DARK.items())
    dark += f'[stroke="{INK}"]{{stroke:#e6e9ee}}'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" font-family="sans-serif" font-size="{size}">',
        f"<style>@media (prefers-color-scheme:dark){{{dark}}}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    )
    return "\n".join([*head, *parts, "</svg>\n"])
