"""The compression stages, one a file:

perception -> positions -> heads -> shorten -> importance -> budget -> modality -> protect -> merge -> quantize.

The order is part of the method: quantization comes last, so that scores do not see its noise.
"""
