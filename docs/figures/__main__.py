"""``python docs/figures`` draws every figure of the documentation anew; needs the extra `docs`."""

from pictures import draw_entry, draw_hit, draw_layers, draw_tiers
from plots import draw_control, draw_copy, draw_hits, draw_ttft
from style import save_style

for draw in (
    draw_hit,
    draw_tiers,
    draw_layers,
    draw_entry,
    draw_copy,
    draw_control,
    draw_ttft,
    draw_hits,
    save_style,
):
    draw()
