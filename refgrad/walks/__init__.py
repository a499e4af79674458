"""How does a gradient go backwards through a model, step by step and with numbers?"""
