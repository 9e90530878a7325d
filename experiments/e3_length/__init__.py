"""How much of a longer row does one trained model read, by the way its positions are stretched?"""
