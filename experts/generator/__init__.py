"""Makes the sample data of the experts: `python -m experts.generator`.

Rows are made by one module per language (`make_rows`) from the same domains, and checked by another (`check_row`), so
that making them needs the standard library only and checking them brings the parsers.
"""
