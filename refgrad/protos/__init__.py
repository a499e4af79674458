"""How is a model read, walked, upgraded, inlined, checked, saved?"""
