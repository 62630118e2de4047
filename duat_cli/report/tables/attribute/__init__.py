"""`duat attribute` as text for a terminal, and the words and sums that HTML pages share with it."""
