"""E8: a model trained on short rows is tuned to longer ones, with the base changed or not."""
