"""Building blocks of all pictures: elements, scales, axes, marks, tables, and the figure that holds them."""
