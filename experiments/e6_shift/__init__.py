"""Do the logits of a trained model stay when the whole text moves to far positions?"""
