-- The front page: its heading as plain HTML, so that its sections are those of the page, for the search and the layout.
function Header(heading)
  if heading.level == 1 then return pandoc.RawBlock("html", "<h1>" .. pandoc.utils.stringify(heading) .. "</h1>") end
end
