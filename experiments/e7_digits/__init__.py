"""Which positions of a 2-D grid still serve when an image comes at twice the resolution?"""
