"""An adapter on its way into a model: facts from its folder, its keys against the model's, and the attachment."""
