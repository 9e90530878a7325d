"""Does the base bound the distance at which a model retrieves, and does perplexity show it?"""
