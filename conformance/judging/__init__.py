"""Is a gradient right?"""
