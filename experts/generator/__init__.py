"""Generator of the sample data of the experts: `python -m experts.generator`.

For each language, one module makes the rows (`make_rows`) from shared domains, and another checks them (`check_row`):
only the checks need packages besides the standard library, such as parsers.
"""
