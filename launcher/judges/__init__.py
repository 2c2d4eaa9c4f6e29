"""Does the expert do its job: answers judged by real parsers, compilers and databases."""
