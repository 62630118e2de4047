"""`duat attribute` as text for a terminal, and the words and sums that its pages share."""
