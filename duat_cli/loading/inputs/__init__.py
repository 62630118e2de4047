"""Inputs of models of images and sound: files of the user, or a drawn picture and a computed tone."""
