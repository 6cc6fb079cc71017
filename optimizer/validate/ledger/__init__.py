"""The same inputs through every form that the model takes: is it still the same model?"""
