"""What all pictures share: elements, scales, axes, marks, tables, and the figure that holds them."""
