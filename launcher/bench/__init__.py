"""Speed measurements: A/B tests of one setting (`--vary`), ablations, and old-against-new regressions."""
