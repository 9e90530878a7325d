"""What every experiment shares: text, model, trainer, results."""
