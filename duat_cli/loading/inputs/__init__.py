"""What models of images and sound read: files of the user, or a drawn picture and a computed tone."""
